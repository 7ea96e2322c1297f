// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"fmt"
	"reflect"
	"slices"
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

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
)

// +kubebuilder:rbac:groups=apps,resources=daemonsets,verbs=list;watch
// +kubebuilder:rbac:groups=resource.k8s.io,resources=resourceclaims;resourceslices,verbs=list;watch

// DRA drivers publish devices in slices, and pods have devices by claims. Clusters before Kubernetes 1.32, and some after, serve
// neither.
var (
	sliceKind = schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}
	claimKind = schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceClaim"}
)

// serveAgain is how often the API server is asked for these kinds while it does not serve them.
const serveAgain = time.Minute

// watchedKind is a kind that the API server may not serve, and the version of it that is watched; nil: none is.
type watchedKind struct {
	schema.GroupKind
	served atomic.Pointer[schema.GroupVersionKind]
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
		if !world.MakesGPUOffers(set) || set.DeletionTimestamp != nil {
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
	published, err := c.slices.list(ctx, c.client)
	if err != nil {
		return err
	}
	for i := range published {
		driver, _, _ := unstructured.NestedString(published[i].Object, "spec", "driver")
		node, _, _ := unstructured.NestedString(published[i].Object, "spec", "nodeName")
		if driver == world.DRADriver && node != "" {
			shows[node] = "ResourceSlice " + published[i].GetName()
		}
	}
	return nil
}

// gatherClaims finds the pods for which a ResourceClaim is allocated from NVIDIA's DRA driver: the claim, by the UID of the pod. An
// allocation precedes the start of the pod, and older kubelets do not report to the agent who has GPUs by claims.
func (c *Controller) gatherClaims(ctx context.Context) (map[string]string, error) {
	claims, err := c.claims.list(ctx, c.client)
	if err != nil {
		return nil, err
	}
	holds := map[string]string{}
	for i := range claims {
		claim := &claims[i]
		if !allocatesGPU(claim) {
			continue
		}
		for _, pod := range listIn(claim, "status", "reservedFor") {
			if uid, _, _ := unstructured.NestedString(asMap(pod), "uid"); uid != "" {
				holds[uid] = claim.GetNamespace() + "/" + claim.GetName()
			}
		}
	}
	return holds, nil
}

// allocatesGPU reports whether a ResourceClaim is allocated from NVIDIA's DRA driver.
func allocatesGPU(claim *unstructured.Unstructured) bool {
	results := listIn(claim, "status", "allocation", "devices", "results")
	return slices.ContainsFunc(results, func(result any) bool { return asMap(result)["driver"] == world.DRADriver })
}

// listIn is a list in an object, which must not be changed.
func listIn(o *unstructured.Unstructured, path ...string) []any {
	value, _, _ := unstructured.NestedFieldNoCopy(o.Object, path...)
	list, _ := value.([]any)
	return list
}

func asMap(value any) map[string]any {
	m, _ := value.(map[string]any)
	return m
}

// watchKind wakes the controller when an object of a kind changes, as soon as the API server serves the kind. Nothing waits for
// that: a pod or the DaemonSet shows NVIDIA's DRA driver too, and the agent reports what pods hold.
func (c *Controller) watchKind(kind *watchedKind, mgr manager.Manager) source.TypedSource[Pass] {
	return source.TypedFunc[Pass](func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[Pass]) error {
		go func() {
			_ = wait.PollUntilContextCancel(ctx, serveAgain, true, func(ctx context.Context) (bool, error) {
				err := kind.watch(ctx, mgr, func() { queue.AddAfter(Pass{}, gathering) })
				if err != nil && !meta.IsNoMatchError(err) {
					log.FromContext(ctx).Error(err, "watching a kind", "kind", kind.Kind)
				}
				return err == nil, nil
			})
		}()
		return nil
	})
}

func (k *watchedKind) watch(ctx context.Context, mgr manager.Manager, wake func()) error {
	mapping, err := mgr.GetRESTMapper().RESTMapping(k.GroupKind)
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(mapping.GroupVersionKind)
	informer, err := mgr.GetCache().GetInformer(ctx, object, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandlerWithOptions(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { wake() }, DeleteFunc: func(any) { wake() },
		UpdateFunc: func(old, updated any) {
			if !reflect.DeepEqual(contentOf(old), contentOf(updated)) {
				wake()
			}
		},
	}, toolscache.HandlerOptions{})
	if err == nil && toolscache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		k.served.Store(&mapping.GroupVersionKind)
		wake() // the objects count from now on
	}
	return err
}

// contentOf is what the cache keeps of an object, without its metadata.
func contentOf(cached any) [2]any {
	object, is := cached.(*unstructured.Unstructured)
	if !is {
		return [2]any{}
	}
	return [2]any{object.Object["spec"], object.Object["status"]}
}

// slimOthers keeps of objects whose kinds cannot be named in CacheOptions what decisions depend on.
func slimOthers(cached any) (any, error) {
	object, isUnstructured := cached.(*unstructured.Unstructured)
	if !isUnstructured {
		return pluginconfig.SlimNodeFeature(cached)
	}
	slim := &unstructured.Unstructured{Object: map[string]any{}}
	switch object.GroupVersionKind().GroupKind() {
	case sliceKind:
		spec := asMap(object.Object["spec"])
		slim.Object["spec"] = map[string]any{"driver": spec["driver"], "nodeName": spec["nodeName"]}
	case nodePoolKind:
		slim.Object["spec"] = startupTaints(object)
	case claimKind:
		if allocatesGPU(object) {
			slim.Object["status"] = gpuAllocation(object)
		}
	default:
		return pluginconfig.SlimNodeFeature(cached)
	}
	slim.SetGroupVersionKind(object.GroupVersionKind())
	slim.SetNamespace(object.GetNamespace())
	slim.SetName(object.GetName())
	slim.SetUID(object.GetUID())
	slim.SetResourceVersion(object.GetResourceVersion())
	return slim, nil
}

// gpuAllocation is what the cache keeps of the status of a ResourceClaim: that it is allocated from NVIDIA's DRA driver, and for whom.
func gpuAllocation(claim *unstructured.Unstructured) map[string]any {
	pods := listIn(claim, "status", "reservedFor")
	reserved := make([]any, 0, len(pods))
	for _, pod := range pods {
		reserved = append(reserved, map[string]any{"uid": asMap(pod)["uid"]})
	}
	return map[string]any{
		"allocation":  map[string]any{"devices": map[string]any{"results": []any{map[string]any{"driver": world.DRADriver}}}},
		"reservedFor": reserved,
	}
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
	if world.MakesGPUOffers(set) {
		pod := &set.Spec.Template
		slim.Spec.Template.Labels = pod.Labels
		slim.Spec.Template.Spec.NodeSelector, slim.Spec.Template.Spec.Affinity = pod.Spec.NodeSelector, pod.Spec.Affinity
		for i := range pod.Spec.Containers {
			slim.Spec.Template.Spec.Containers = append(slim.Spec.Template.Spec.Containers, corev1.Container{Name: pod.Spec.Containers[i].Name})
		}
	}
	return slim, nil
}
