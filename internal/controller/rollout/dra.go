// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/wiring"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// +kubebuilder:rbac:groups=apps,resources=daemonsets,verbs=list;watch
// +kubebuilder:rbac:groups=resource.k8s.io,resources=resourceslices,verbs=list;watch

// sliceKind is the kind in which DRA drivers publish devices. Clusters before Kubernetes 1.32, and some after, do not serve it.
var sliceKind = schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}

// sliceAgain is how often the API server is asked for that kind while it does not serve it.
const sliceAgain = time.Minute

// resourceSlices is the version of sliceKind that is watched; nil: none is.
type resourceSlices struct {
	served atomic.Pointer[schema.GroupVersionKind]
}

// gatherDRA finds by which objects NVIDIA's DRA driver shows on which nodes, besides its pods.
func (c *Controller) gatherDRA(ctx context.Context, nodes map[string]*corev1.Node) (map[string]string, error) {
	shows := map[string]string{}
	if err := c.gatherSlices(ctx, shows); err != nil {
		return nil, err
	}
	sets := &appsv1.DaemonSetList{}
	if err := c.client.List(ctx, sets, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading DaemonSets: %w", err)
	}
	for i := range sets.Items {
		set := &sets.Items[i]
		if !rollout.MakesGPUOffers(set) || set.DeletionTimestamp != nil {
			continue
		}
		required := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: set.Spec.Template.Spec})
		for n := range nodes {
			if is, err := required.Match(nodes[n]); is && err == nil {
				shows[n] = fmt.Sprintf("DaemonSet %s/%s", set.Namespace, set.Name)
			}
		}
	}
	return shows, nil
}

func (c *Controller) gatherSlices(ctx context.Context, shows map[string]string) error {
	kind := c.slices.served.Load()
	if kind == nil {
		return nil
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := c.client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading ResourceSlices: %w", err)
	}
	for i := range list.Items {
		driver, _, _ := unstructured.NestedString(list.Items[i].Object, "spec", "driver")
		node, _, _ := unstructured.NestedString(list.Items[i].Object, "spec", "nodeName")
		if driver == rollout.DRADriver && node != "" {
			shows[node] = "ResourceSlice " + list.Items[i].GetName()
		}
	}
	return nil
}

// watchSlices wakes the controller when a ResourceSlice comes or goes, as soon as the API server serves them. Nothing waits for
// that: a pod or the DaemonSet shows the same.
func (c *Controller) watchSlices(mgr manager.Manager) source.TypedSource[Pass] {
	return source.TypedFunc[Pass](func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[Pass]) error {
		go func() {
			_ = wait.PollUntilContextCancel(ctx, sliceAgain, true, func(ctx context.Context) (bool, error) {
				err := c.slices.watch(ctx, mgr, func() { queue.AddAfter(Pass{}, gathering) })
				if err != nil && !meta.IsNoMatchError(err) {
					log.FromContext(ctx).Error(err, "watching ResourceSlices")
				}
				return err == nil, nil
			})
		}()
		return nil
	})
}

func (s *resourceSlices) watch(ctx context.Context, mgr manager.Manager, wake func()) error {
	mapping, err := mgr.GetRESTMapper().RESTMapping(sliceKind)
	if err != nil {
		return err
	}
	slice := &unstructured.Unstructured{}
	slice.SetGroupVersionKind(mapping.GroupVersionKind)
	informer, err := mgr.GetCache().GetInformer(ctx, slice, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandlerWithOptions(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { wake() }, DeleteFunc: func(any) { wake() },
	}, toolscache.HandlerOptions{})
	if err == nil && toolscache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		s.served.Store(&mapping.GroupVersionKind)
	}
	return err
}

// slimOthers keeps of objects whose kinds cannot be named in CacheOptions what decisions depend on.
func slimOthers(cached any) (any, error) {
	slice, isUnstructured := cached.(*unstructured.Unstructured)
	if !isUnstructured || slice.GroupVersionKind().GroupKind() != sliceKind {
		return wiring.SlimNodeFeature(cached)
	}
	spec, _, _ := unstructured.NestedMap(slice.Object, "spec")
	slim := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"driver": spec["driver"], "nodeName": spec["nodeName"]}}}
	slim.SetGroupVersionKind(slice.GroupVersionKind())
	slim.SetName(slice.GetName())
	slim.SetUID(slice.GetUID())
	slim.SetResourceVersion(slice.GetResourceVersion())
	return slim, nil
}

// slimDaemonSet keeps of DaemonSets what tells that of NVIDIA's DRA driver and its nodes. Of others nothing is kept.
func slimDaemonSet(object any) (any, error) {
	set, is := object.(*appsv1.DaemonSet)
	if !is {
		return object, nil
	}
	slim := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{
		Namespace: set.Namespace, Name: set.Name, UID: set.UID, ResourceVersion: set.ResourceVersion, DeletionTimestamp: set.DeletionTimestamp,
		Generation: set.Generation,
	}}
	if rollout.MakesGPUOffers(set) {
		pod := &set.Spec.Template
		slim.Spec.Template.Labels = pod.Labels
		slim.Spec.Template.Spec.NodeSelector, slim.Spec.Template.Spec.Affinity = pod.Spec.NodeSelector, pod.Spec.Affinity
		for i := range pod.Spec.Containers {
			slim.Spec.Template.Spec.Containers = append(slim.Spec.Template.Spec.Containers, corev1.Container{Name: pod.Spec.Containers[i].Name})
		}
	}
	return slim, nil
}
