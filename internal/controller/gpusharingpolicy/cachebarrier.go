// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// cacheBarrier is what the cache has to show before a reconcile may decide: which nodes hold a slot in the budget is
// read from Nodes and GPUNodes, so a reconcile over a cache that lacks our last write could give the same slot away
// twice. It is the one thing that is remembered from reconcile to reconcile:
//
//   - what this process wrote, at the resource version that the API server answered with;
//   - what it may have written: where no answer came, the object is read from the API server before the next reconcile;
//   - what an earlier leader wrote: before its first reconcile, a new leader reads from the API server how far all objects
//     are. Its cache may have been filled long before, or from an API server that lags behind.
//
// What others write may come late: none of it can hide that a node holds a slot.
type cacheBarrier struct {
	reader   client.Reader // not cached
	mu       sync.Mutex    // guards expected while actions are carried out
	expected map[object]expectation
	begun    map[schema.GroupVersionKind]bool // how far all objects of a kind are was read
}

// object is a Node, a GPUNode or a DeviceTaintRule.
type object struct {
	kind schema.GroupVersionKind
	name string
}

func (o object) String() string { return o.kind.Kind + " " + o.name }

// expectation is the resource version that the cache must have reached. While it is empty, the API server is asked.
type expectation struct {
	version string
	since   time.Time // when it was expected first
}

var (
	nodeKind    = corev1.SchemeGroupVersion.WithKind("Node")
	gpuNodeKind = v1alpha1.SchemeGroupVersion.WithKind("GPUNode")
)

const (
	// lookAgain is how soon a cache is looked at again that lacks something: it follows within milliseconds.
	lookAgain = 50 * time.Millisecond
	// lagDeadline is how long a cache may lag behind before that is an error, and the API server is asked whether what
	// is waited for is still so.
	lagDeadline = 30 * time.Second
	// pageSize is how many objects the API server is asked for at once.
	pageSize = 500
)

// wrote notes a write of ours: the resource version of the object after it, or the error. What the cache lacked when
// another controller was faster, it has to show too.
func (c *cacheBarrier) wrote(kind schema.GroupVersionKind, name, version string, err error, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
		c.expected[object{kind, name}] = expectation{version: version, since: now}
	case inDoubt(err), apierrors.IsConflict(err):
		c.expected[object{kind, name}] = expectation{since: now}
	}
}

// inDoubt reports whether a write may have been carried out though it failed: the API server did not say that it was
// not.
func inDoubt(err error) bool {
	var said apierrors.APIStatus
	if !errors.As(err, &said) {
		return true
	}
	return apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsInternalError(err) ||
		apierrors.IsServiceUnavailable(err) || said.Status().Reason == metav1.StatusReasonUnknown
}

// missing names an object that the cache does not show yet as it must; empty if there is none. It is an error if that
// takes too long.
func (c *cacheBarrier) missing(ctx context.Context, cache client.Reader, now time.Time, rules *schema.GroupVersionKind) (string, error) {
	kinds := []schema.GroupVersionKind{nodeKind, gpuNodeKind}
	if rules != nil {
		kinds = append(kinds, *rules)
	}
	if err := c.begin(ctx, now, kinds); err != nil {
		return "", err
	}
	lacking := ""
	for o, e := range c.expected {
		shown, err := c.shows(ctx, cache, o, e, now)
		if err != nil {
			return "", err
		}
		if shown {
			delete(c.expected, o)
		} else {
			lacking = o.String()
		}
	}
	return lacking, nil
}

// begin reads, once, how far all objects of each kind are.
func (c *cacheBarrier) begin(ctx context.Context, now time.Time, kinds []schema.GroupVersionKind) error {
	for _, kind := range kinds {
		if c.begun[kind] {
			continue
		}
		page := &metav1.PartialObjectMetadataList{}
		for more := true; more; more = page.Continue != "" {
			page.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
			if err := c.reader.List(ctx, page, client.Limit(pageSize), client.Continue(page.Continue)); err != nil {
				return fmt.Errorf("reading how far the cache must be: %w", err)
			}
			for i := range page.Items {
				c.expected[object{kind, page.Items[i].Name}] = expectation{version: page.Items[i].ResourceVersion, since: now}
			}
		}
		if c.begun == nil {
			c.begun = map[schema.GroupVersionKind]bool{}
		}
		c.begun[kind] = true
	}
	return nil
}

// shows reports whether the cache shows an object as it is expected, or the object is gone. What the cache does not
// have, or not in time, is asked of the API server: the object may have been deleted, or made anew.
func (c *cacheBarrier) shows(ctx context.Context, cache client.Reader, o object, e expectation, now time.Time) (bool, error) {
	cached, err := versionIn(ctx, cache, typed(o.kind), o)
	if err != nil {
		return false, err
	}
	late := now.Sub(e.since) > lagDeadline
	if e.version == "" || cached == "" || late {
		is, err := versionIn(ctx, c.reader, metadata(o.kind), o)
		if err != nil || is == "" {
			return err == nil, err
		}
		e = expectation{version: is, since: now}
		c.expected[o] = e
	}
	if reached(cached, e.version) {
		return true, nil
	}
	if late {
		return false, fmt.Errorf("the cache has not shown %s at resource version %s for more than %s; nothing is decided before it does",
			o, e.version, lagDeadline)
	}
	return false, nil
}

// versionIn is the resource version of an object; empty if there is none.
func versionIn(ctx context.Context, from client.Reader, into client.Object, o object) (string, error) {
	err := from.Get(ctx, types.NamespacedName{Name: o.name}, into, client.UnsafeDisableDeepCopy)
	if apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("reading the resource version of %s: %w", o, err)
	}
	return into.GetResourceVersion(), nil
}

func typed(kind schema.GroupVersionKind) client.Object {
	switch kind {
	case nodeKind:
		return &corev1.Node{}
	case gpuNodeKind:
		return &v1alpha1.GPUNode{}
	}
	rule := &unstructured.Unstructured{}
	rule.SetGroupVersionKind(kind)
	return rule
}

func metadata(kind schema.GroupVersionKind) client.Object {
	m := &metav1.PartialObjectMetadata{}
	m.SetGroupVersionKind(kind)
	return m
}

// reached compares the resource versions of one kind. One that is no number is compared for being the same.
func reached(version, expected string) bool {
	if version == "" {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(version, expected)
	if err != nil {
		return version == expected
	}
	return order >= 0
}
