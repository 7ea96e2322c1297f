// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package wiring

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// kind is one of NVIDIA's or Node Feature Discovery's kinds, whose definition may be installed before us, after us or never.
type kind struct {
	schema.GroupVersionKind
	crd string // name of its definition
}

func (k kind) list() schema.GroupVersionKind {
	return k.GroupVersion().WithKind(k.Kind + "List")
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

// tryAgain is how long after its definition appeared a kind is asked for again until it is served.
const tryAgain = time.Second

// Source puts a request into the queue when an object of NVIDIA's changes. A kind that is not served is watched as soon
// as it is, and no longer than it is: a watch on one that does not exist would keep the controller from starting.
func Source[R comparable](c cache.Cache, request R) source.TypedSource[R] {
	return source.TypedFunc[R](func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[R]) error {
		informer, err := c.GetInformer(ctx, Definitions())
		if err != nil {
			return fmt.Errorf("watching custom resource definitions: %w", err)
		}
		w := &watcher{cache: c, wake: func() { queue.Add(request) }, stop: map[string]context.CancelFunc{}}
		_, err = informer.AddEventHandlerWithOptions(w.definitions(ctx), toolscache.HandlerOptions{})
		return err
	})
}

// watcher watches NVIDIA's kinds while they are served. The informer calls it from one goroutine.
type watcher struct {
	cache cache.Cache
	wake  func()
	stop  map[string]context.CancelFunc // by name of the definition, of those that are watched
}

// definitions handles what happens to custom resource definitions.
func (w *watcher) definitions(ctx context.Context) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(object any) {
			if k, found := kindOf(object); found {
				w.begin(ctx, k)
			}
		},
		DeleteFunc: func(object any) {
			if k, found := kindOf(object); found {
				w.end(ctx, k)
			}
		},
	}
}

func (w *watcher) begin(ctx context.Context, k kind) {
	ctx, w.stop[k.crd] = context.WithCancel(ctx)
	go func() {
		// Ends with the context; what keeps it going is that the kind is not served yet.
		_ = wait.PollUntilContextCancel(ctx, tryAgain, true, func(ctx context.Context) (bool, error) {
			err := w.watch(ctx, k)
			if err != nil {
				log.FromContext(ctx).V(1).Info("kind not served yet", "definition", k.crd, "error", err.Error())
			}
			return err == nil, nil
		})
	}()
}

func (w *watcher) watch(ctx context.Context, k kind) error {
	informer, err := w.cache.GetInformer(ctx, object(k), cache.BlockUntilSynced(false))
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

func (w *watcher) end(ctx context.Context, k kind) {
	if stop, found := w.stop[k.crd]; found {
		stop()
		delete(w.stop, k.crd)
	}
	if err := w.cache.RemoveInformer(ctx, object(k)); err != nil {
		log.FromContext(ctx).Error(err, "stopping the watch on a kind that is no longer served", "definition", k.crd)
	}
	w.wake()
}

// matters says whether an update changes what Observe reads. The GPU Operator updates its status all the time.
func matters(old, updated any) bool {
	a, isObject := old.(*unstructured.Unstructured)
	b, areObjects := updated.(*unstructured.Unstructured)
	if !isObject || !areObjects {
		return true
	}
	if b.GroupVersionKind() == nodeFeature.GroupVersionKind {
		return asksAnew(a, b)
	}
	return a.GetGeneration() != b.GetGeneration() || namespaceOf(a) != namespaceOf(b)
}

func object(k kind) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(k.GroupVersionKind)
	return o
}

// kindOf is the kind of NVIDIA's that a definition defines, if it is one of those that matter.
func kindOf(definition any) (kind, bool) {
	if gone, isGone := definition.(toolscache.DeletedFinalStateUnknown); isGone {
		definition = gone.Obj
	}
	o, isObject := definition.(metav1.Object)
	if !isObject {
		return kind{}, false
	}
	for _, k := range []kind{clusterPolicy, gpuCluster, nodeFeature} {
		if o.GetName() == k.crd {
			return k, true
		}
	}
	return kind{}, false
}
