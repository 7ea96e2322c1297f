// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// kind is one of NVIDIA's or Node Feature Discovery's kinds, whose definition may be installed before us, after us or
// never. Its version is the one that we know; the definition may serve another (apiversions.go).
type kind struct {
	schema.GroupVersionKind
	crd string // name of its definition
}

var (
	clusterPolicy = kind{
		schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"}, "clusterpolicies.nvidia.com",
	}
	gpuCluster = kind{
		schema.GroupVersionKind{Group: "nvidia.com", Version: "v1alpha1", Kind: "GPUCluster"}, "gpuclusters.nvidia.com",
	}
	customResourceDefinition = schema.GroupVersionKind{
		Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition",
	}
)

// Definitions are custom resource definitions, as they are read and watched: their metadata.
func Definitions() *metav1.PartialObjectMetadata {
	definitions := &metav1.PartialObjectMetadata{}
	definitions.SetGroupVersionKind(customResourceDefinition)
	return definitions
}

func isNotCached(err error) bool {
	var notCached *cache.ErrResourceNotCached
	return errors.As(err, &notCached)
}

// tryAgain is how often a kind that has a definition is asked for until it is served.
const tryAgain = time.Second

// Source puts a request into the queue when an object of NVIDIA's changes. A kind is watched in the version that is
// served, as long as one is: a watch on a kind that does not exist would keep the controller from starting.
func Source[R comparable](configurer *Configurer, c cache.Cache, request R) source.TypedSource[R] {
	return source.TypedFunc[R](func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[R]) error {
		informer, err := c.GetInformer(ctx, Definitions())
		if err != nil {
			return fmt.Errorf("watching custom resource definitions: %w", err)
		}
		watch := &watcher{configurer: configurer, cache: c, wake: func() { queue.Add(request) }, changed: map[string]chan struct{}{}}
		for _, k := range []kind{clusterPolicy, gpuCluster, nodeFeature} {
			watch.changed[k.crd] = make(chan struct{}, 1)
			go watch.follow(ctx, k)
		}
		_, err = informer.AddEventHandlerWithOptions(watch.definitions(), toolscache.HandlerOptions{})
		return err
	})
}

// watcher watches NVIDIA's kinds while they are served.
type watcher struct {
	configurer *Configurer
	cache      cache.Cache
	wake       func()
	changed    map[string]chan struct{} // by name of the definition: it was added, changed or deleted
}

// definitions handles what happens to custom resource definitions.
func (w *watcher) definitions() toolscache.ResourceEventHandler {
	tell := func(definition any) {
		name := nameOf(definition)
		if slices.Contains(ownDefinitions(), name) {
			w.wake()
		}
		select {
		case w.changed[name] <- struct{}{}:
		default: // another one's, or told already
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: tell, UpdateFunc: func(_, updated any) { tell(updated) }, DeleteFunc: tell,
	}
}

// follow watches a kind in the version that is served, whatever that is at the time.
func (w *watcher) follow(ctx context.Context, k kind) {
	again := clock.RealClock{}.NewTicker(tryAgain) // of the API server, whatever the time of the policies is
	defer again.Stop()
	var watched version
	for {
		err := w.adjust(ctx, k, &watched)
		var retry <-chan time.Time
		if err != nil {
			log.FromContext(ctx).V(1).Info("Kind not served yet", "definition", k.crd, "error", err.Error())
			retry = again.C()
		}
		select {
		case <-ctx.Done():
			return
		case <-w.changed[k.crd]:
		case <-retry:
		}
	}
}

// adjust ends the watch on a version that is no longer served, and begins that on the one which is.
func (w *watcher) adjust(ctx context.Context, k kind, watched *version) error {
	served, err := w.configurer.served(ctx, k)
	if err != nil && !errors.Is(err, ErrNotSynced) {
		return err
	}
	if *watched != served && *watched != (version{}) {
		if err := w.cache.RemoveInformer(ctx, object(watched.GroupVersionKind)); err != nil {
			return fmt.Errorf("ending the watch on %s: %w", watched, err)
		}
		*watched = version{}
		w.wake()
	}
	if *watched == served {
		return err
	}
	if err := w.watch(ctx, served); err != nil {
		return err
	}
	*watched = served
	return nil
}

func (w *watcher) watch(ctx context.Context, v version) error {
	informer, err := w.cache.GetInformer(ctx, object(v.GroupVersionKind), cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandlerWithOptions(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { w.wake() },
		UpdateFunc: func(old, updated any) {
			if matters(old, updated) {
				w.wake()
			}
		},
		DeleteFunc: func(any) { w.wake() },
	}, toolscache.HandlerOptions{})
	w.wake()
	return err
}

// matters reports whether an update changes what Observe reads. The GPU Operator updates its status all the time.
func matters(old, updated any) bool {
	a, isObject := old.(*unstructured.Unstructured)
	b, areObjects := updated.(*unstructured.Unstructured)
	if !isObject || !areObjects {
		return true
	}
	if b.GroupVersionKind().GroupKind() == nodeFeature.GroupKind() {
		return requestChanged(a, b)
	}
	ignored := func(o *unstructured.Unstructured) bool { return stringAt(o, "status", "state") == "ignored" }
	return a.GetGeneration() != b.GetGeneration() || namespaceOf(a) != namespaceOf(b) || ignored(a) != ignored(b)
}

func object(k schema.GroupVersionKind) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(k)
	return o
}

// nameOf is the name of a definition; empty if it is none.
func nameOf(definition any) string {
	if gone, isGone := definition.(toolscache.DeletedFinalStateUnknown); isGone {
		definition = gone.Obj
	}
	if o, isObject := definition.(metav1.Object); isObject {
		return o.GetName()
	}
	return ""
}
