// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

const (
	// staleAgain is how soon to look again at a cache that does not show the last write. It follows within
	// milliseconds.
	staleAgain = 100 * time.Millisecond
	// refusedAgain is how long to wait before a write that the API server has refused.
	refusedAgain = time.Minute
)

// stale reports whether the cache lacks one of the last writes, so that what it shows may be what was there before.
func (c *Controller) stale(s *autoscaling.Snapshot) bool {
	shown := map[string]string{}
	for i := range s.Scalables {
		s := &s.Scalables[i]
		shown[autoscaling.Write{Annotate: &autoscaling.Annotate{Ref: s.Ref}}.ObjectName()] = s.ResourceVersion
	}
	for object, before := range c.wrote {
		if shown[object] == before {
			return true
		}
		delete(c.wrote, object)
	}
	return false
}

// write writes what is wanted; after is when to try again what was refused.
func (c *Controller) write(ctx context.Context, s *autoscaling.Snapshot, writes []autoscaling.Write) (after time.Duration) {
	for object, r := range c.refused {
		if !slices.ContainsFunc(writes, func(write autoscaling.Write) bool { return write.ObjectName() == object }) {
			delete(c.refused, object) // nobody wants it any more, or it is there
			continue
		}
		if age := s.Now.Sub(r.at); age < refusedAgain {
			after = timing.Sooner(after, refusedAgain-age)
		}
	}
	for _, write := range writes {
		object := write.ObjectName()
		content := contentOf(write)
		if r, is := c.refused[object]; is && s.Now.Sub(r.at) < refusedAgain && reflect.DeepEqual(r.content, content) {
			continue
		}
		err := c.writeOne(ctx, write)
		switch {
		case err == nil:
			log.FromContext(ctx).Info("Wrote for the autoscaler", "object", object)
			delete(c.refused, object)
		case isOutdated(err):
			after = timing.Sooner(after, staleAgain) // the object changed or went: the next reconcile decides anew
		default:
			log.FromContext(ctx).Error(err, "Writing for the autoscaler", "object", object)
			c.refused[object] = refusal{autoscaling.Refusal{Forbidden: apierrors.IsForbidden(err), Conflict: apierrors.IsConflict(err), Message: err.Error()}, content, s.Now}
			after = timing.Sooner(after, staleAgain) // to report it
		}
	}
	return after
}

// contentOf is what a write writes, whatever the object was before.
func contentOf(write autoscaling.Write) autoscaling.Write {
	if write.Annotate != nil {
		a := *write.Annotate
		a.ResourceVersion = ""
		write.Annotate = &a
	}
	return write
}

func (c *Controller) writeOne(ctx context.Context, write autoscaling.Write) error {
	owner := client.FieldOwner(autoscaling.FieldManager)
	switch {
	case write.Overlay != nil:
		return c.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(&unstructured.Unstructured{Object: write.Overlay.Object}), owner)
	case write.Delete != nil:
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(c.kinds.watching[overlays.definition].GroupVersionKind)
		o.SetName(write.Delete.Name)
		uid := types.UID(write.Delete.UID)
		return client.IgnoreNotFound(c.client.Delete(ctx, o, client.Preconditions{UID: &uid}))
	case write.Startup != nil:
		return c.taint(ctx, *write.Startup)
	}
	a := write.Annotate
	o := &unstructured.Unstructured{}
	o.SetAPIVersion(a.Version)
	o.SetKind(string(a.Kind))
	o.SetNamespace(a.Namespace)
	o.SetName(a.Name)
	o.SetUID(types.UID(a.UID))
	o.SetResourceVersion(a.ResourceVersion)
	o.SetAnnotations(a.Annotations)
	options := []client.ApplyOption{owner}
	if a.Force {
		options = append(options, client.ForceOwnership)
	}
	if err := c.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), options...); err != nil {
		return err
	}
	if o.GetResourceVersion() != a.ResourceVersion { // otherwise nothing changed, and no cache will ever show another version
		c.wrote[write.ObjectName()] = a.ResourceVersion
	}
	return nil
}

// taint puts the startup taint of a node without a GPU label on it, or takes it off.
func (c *Controller) taint(ctx context.Context, s autoscaling.Startup) error {
	node := &corev1.Node{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: s.Node}, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	base := node.DeepCopy()
	node.Spec.Taints = autoscaling.WithStartup(node.Spec.Taints, s.On)
	return c.client.Patch(ctx, node, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}))
}

// isOutdated reports whether a write was refused because the object has changed, or is another one or none by now.
func isOutdated(err error) bool {
	if apierrors.IsNotFound(err) {
		return true
	}
	if !apierrors.IsConflict(err) {
		return false
	}
	var status apierrors.APIStatus
	return !errors.As(err, &status) || status.Status().Details == nil || !slices.ContainsFunc(status.Status().Details.Causes, func(cause metav1.StatusCause) bool {
		return cause.Type == metav1.CauseTypeFieldManagerConflict
	})
}

// capacity is what an infrastructure template says of a machine.
type capacity struct {
	of map[string]int64 // nil: it cannot be read
	at time.Time
}

// capacityFor is how long a template counts that was read. Its spec never changes, and its provider fills the status once.
const capacityFor = 5 * time.Minute

// gatherCapacities reads the infrastructure templates of the groups of Cluster API. Each provider has a kind of its own, which the operator may
// read with the rights of config/autoscaling if it knows it; what cannot be read is not known.
func (c *Controller) gatherCapacities(ctx context.Context, s *autoscaling.Snapshot) {
	if len(s.Policies) == 0 {
		return
	}
	read := map[string]capacity{}
	for i := range s.Scalables {
		of := &s.Scalables[i]
		if of.Template.Kind == "" || of.Owner != nil {
			continue
		}
		key := strings.Join([]string{of.Template.Group, of.Template.Kind, of.Namespace, of.Template.Name}, "/")
		known, is := read[key]
		if !is {
			if known, is = c.capacities[key]; !is || s.Now.Sub(known.at) >= capacityFor {
				known = capacity{c.readCapacity(ctx, of), s.Now}
			}
			read[key] = known
		}
		of.Capacity = known.of
	}
	c.capacities = read
}

func (c *Controller) readCapacity(ctx context.Context, of *autoscaling.Scalable) map[string]int64 {
	mapping, err := c.client.RESTMapper().RESTMapping(schema.GroupKind{Group: of.Template.Group, Kind: of.Template.Kind})
	if err != nil {
		return nil
	}
	template := &unstructured.Unstructured{}
	template.SetGroupVersionKind(mapping.GroupVersionKind)
	if err := c.reader.Get(ctx, client.ObjectKey{Namespace: of.Namespace, Name: of.Template.Name}, template); err != nil {
		return nil
	}
	return autoscaling.CapacityOf(template)
}
