// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// serveAgain is how often the API server is asked which versions of these kinds it serves. For so long at most the cache
// may be that of a version which is gone.
const serveAgain = time.Minute

// watchedKind is a kind that the API server may not serve, and the version of it that is watched; nil: none is. While
// the controller runs, an upgrade of Kubernetes or a feature gate may take a version away, or bring one.
type watchedKind struct {
	schema.GroupKind
	served atomic.Pointer[schema.GroupVersionKind]
	// awaited reports that it is not known yet whether the API server serves the kind.
	awaited atomic.Bool
}

// list reads all objects of the kind from the cache. There are none as long as the kind is not watched.
func (k *watchedKind) list(ctx context.Context, c client.Client) ([]unstructured.Unstructured, error) {
	kind := k.served.Load()
	if kind == nil {
		return nil, nil
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := c.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading %ss: %w", kind.Kind, err)
	}
	return list.Items, nil
}

// watchKind wakes the controller when an object of a kind changes, while the API server serves the kind. Only nodes of
// NVIDIA's DRA driver wait for that.
func (c *Controller) watchKind(kind *watchedKind, mgr manager.Manager) source.TypedSource[Request] {
	kind.awaited.Store(true)
	return source.TypedFunc[Request](func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[Request]) error {
		server, err := discovery.NewDiscoveryClientForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
		if err != nil {
			return fmt.Errorf("asking which kinds are served: %w", err)
		}
		go wait.UntilWithContext(ctx, func(ctx context.Context) {
			if err := kind.follow(ctx, server, mgr.GetCache(), func() { queue.AddAfter(Request{}, gathering) }); err != nil {
				log.FromContext(ctx).Error(err, "Watching a kind failed, trying again", "kind", kind.Kind)
			}
		}, serveAgain)
		return nil
	})
}

// follow ends the watch on a version that is no longer served, and begins one on a version that is.
func (k *watchedKind) follow(ctx context.Context, server discovery.DiscoveryInterface, c cache.Cache, wake func()) error {
	was := k.served.Load()
	if was != nil {
		if still, err := k.isServed(server, was.GroupVersion().String()); still || err != nil {
			return err
		}
	}
	versions, err := k.versions(ctx, server)
	if err != nil {
		return err
	}
	if was != nil {
		k.awaited.Store(len(versions) > 0)
		k.served.Store(nil)
		log.FromContext(ctx).Info("A version of a kind is no longer served", "kind", was.String(), "served", versions)
		defer wake()
		if err := c.RemoveInformer(ctx, objectOf(*was)); err != nil {
			return fmt.Errorf("ending the watch on %s: %w", was, err)
		}
	}
	if len(versions) == 0 {
		k.awaited.Store(false)
		return nil
	}
	return k.watch(ctx, c, k.WithVersion(versions[0]), wake)
}

// versions are those in which the API server serves the kind now, the preferred one first.
func (k *watchedKind) versions(ctx context.Context, server discovery.DiscoveryInterface) ([]string, error) {
	group := &metav1.APIGroup{}
	err := server.RESTClient().Get().AbsPath("/apis", k.Group).Do(ctx).Into(group)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("asking which versions of %s are served: %w", k.Group, err)
	}
	var served []string
	for _, v := range group.Versions {
		is, err := k.isServed(server, v.GroupVersion)
		if err != nil {
			return nil, err
		}
		if is {
			served = append(served, v.Version)
		}
	}
	return served, nil
}

// isServed reports whether the API server serves the kind in a version of its group now.
func (k *watchedKind) isServed(server discovery.DiscoveryInterface, version string) (bool, error) {
	resources, err := server.ServerResourcesForGroupVersion(version)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("asking which kinds of %s are served: %w", version, err)
	}
	return slices.ContainsFunc(resources.APIResources, func(r metav1.APIResource) bool { return r.Kind == k.Kind }), nil
}

// watch begins to watch a version. The objects count from when the cache has all of them.
func (k *watchedKind) watch(ctx context.Context, c cache.Cache, kind schema.GroupVersionKind, wake func()) error {
	informer, err := c.GetInformer(ctx, objectOf(kind), cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watching %s: %w", kind, err)
	}
	_, err = informer.AddEventHandlerWithOptions(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { wake() }, DeleteFunc: func(any) { wake() },
		UpdateFunc: func(old, updated any) {
			if !reflect.DeepEqual(contentOf(old), contentOf(updated)) {
				wake()
			}
		},
	}, toolscache.HandlerOptions{})
	if err != nil {
		return fmt.Errorf("watching %s: %w", kind, err)
	}
	within, cancel := context.WithTimeout(ctx, serveAgain) // the version may be gone by now
	defer cancel()
	if !toolscache.WaitForCacheSync(within.Done(), informer.HasSynced) {
		return errors.Join(fmt.Errorf("watching %s: reading its objects: %w", kind, within.Err()), c.RemoveInformer(ctx, objectOf(kind)))
	}
	k.served.Store(&kind)
	k.awaited.Store(false)
	wake()
	return nil
}

func objectOf(kind schema.GroupVersionKind) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(kind)
	return object
}

// contentOf is what the cache keeps of an object, without its metadata.
func contentOf(cached any) [2]any {
	object, is := cached.(*unstructured.Unstructured)
	if !is {
		return [2]any{}
	}
	return [2]any{object.Object["spec"], object.Object["status"]}
}
