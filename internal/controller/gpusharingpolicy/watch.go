// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// gathering is how long events are collected before a reconcile. While many nodes change, one reconcile answers many
// events.
const gathering = 100 * time.Millisecond

// Register makes the controller run in a manager.
func (c *Controller) Register(ctx context.Context, mgr manager.Manager) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &corev1.Pod{}, nodeNameField, nodeName); err != nil {
		return fmt.Errorf("indexing pods by node: %w", err)
	}
	c.metrics = shared()
	return builder.TypedControllerManagedBy[Request](mgr).
		Named(c.Name()).
		WithOptions(options()).
		Watches(&v1alpha1.GPUSharingPolicy{}, wake(), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.GPUNode{}, c.changes.watch(differs(gpuNodeView))).
		Watches(&corev1.Node{}, c.changes.watch(differs(nodeView))).
		Watches(&corev1.Pod{}, c.changes.watch(differs(c.podView))).
		Watches(&corev1.ConfigMap{}, wake(), builder.WithPredicates(predicate.ResourceVersionChangedPredicate{})).
		Watches(&appsv1.DaemonSet{}, wake(), builder.WithPredicates(differs(draDaemonSetView))).
		WatchesRawSource(c.watchKind(&c.slices, mgr)).
		WatchesRawSource(c.watchKind(&c.claims, mgr)).
		WatchesRawSource(c.watchKind(&c.classes, mgr)).
		WatchesRawSource(c.watchKind(&c.rules, mgr)).
		WatchesRawSource(c.watchKind(&c.nodePools, mgr)).
		WatchesRawSource(pluginconfig.Source(c.PluginConfig, mgr.GetCache(), Request{})).
		Complete(c)
}

// draDaemonSetView is the generation of the DaemonSet of NVIDIA's DRA driver. It is no longer that one once its GPUs
// are turned off.
func draDaemonSetView(o client.Object) (generation int64, ok bool) {
	set, is := o.(*appsv1.DaemonSet)
	return o.GetGeneration(), is && cluster.MakesGPUOffers(set)
}

// nodeName is empty for pods that are on no node, of which those count that ask for GPUs.
func nodeName(o client.Object) []string {
	if pod, isPod := o.(*corev1.Pod); isPod && (pod.Spec.NodeName != "" || cluster.RequestsGPU(&pod.Spec)) {
		return []string{pod.Spec.NodeName}
	}
	return nil
}

// wake puts the one request into the queue, once for all that happens within a short time.
func wake() handler.TypedEventHandler[client.Object, Request] {
	add := func(q workqueue.TypedRateLimitingInterface[Request]) { q.AddAfter(Request{}, gathering) }
	type queue = workqueue.TypedRateLimitingInterface[Request]
	return handler.TypedFuncs[client.Object, Request]{
		CreateFunc:  func(_ context.Context, _ event.TypedCreateEvent[client.Object], q queue) { add(q) },
		UpdateFunc:  func(_ context.Context, _ event.TypedUpdateEvent[client.Object], q queue) { add(q) },
		DeleteFunc:  func(_ context.Context, _ event.TypedDeleteEvent[client.Object], q queue) { add(q) },
		GenericFunc: func(_ context.Context, _ event.TypedGenericEvent[client.Object], q queue) { add(q) },
	}
}

// differs lets through what changes a view of an object. A view is what decisions depend on; ok is false for an object
// that none depends on.
func differs[V any](view func(client.Object) (v V, ok bool)) predicate.Predicate {
	matters := func(o client.Object) bool {
		_, ok := view(o)
		return ok
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return matters(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool {
			old, did := view(e.ObjectOld)
			updated, does := view(e.ObjectNew)
			return did != does || does && !reflect.DeepEqual(old, updated)
		},
		DeleteFunc:  func(e event.DeleteEvent) bool { return matters(e.Object) },
		GenericFunc: func(event.GenericEvent) bool { return true },
	}
}

type gpuNodeViewed struct {
	generation int64
	retry      string
	status     v1alpha1.GPUNodeStatus
}

func gpuNodeView(o client.Object) (gpuNodeViewed, bool) {
	node, isGPUNode := o.(*v1alpha1.GPUNode)
	if !isGPUNode {
		return gpuNodeViewed{}, false
	}
	return gpuNodeViewed{
		generation: node.Generation, retry: node.Annotations[v1alpha1.AnnotationRetry], status: node.Status,
	}, true
}

// nodeView leaves out heartbeats.
func nodeView(o client.Object) (cluster.Node, bool) {
	node, isNode := o.(*corev1.Node)
	if !isNode {
		return cluster.Node{}, false
	}
	n := cluster.NodeAlone(node)
	n.Annotations = ownAnnotations(n.Annotations)
	return n, true
}

type podViewed struct {
	cluster.Pod
	node            string
	agent, finished bool
}

// podView is a pod that a decision may depend on: one that asks for a GPU, reads our ConfigMap, is an agent or one of
// NVIDIA's operands.
func (c *Controller) podView(o client.Object) (podViewed, bool) {
	pod, isPod := o.(*corev1.Pod)
	if !isPod {
		return podViewed{}, false
	}
	v := podViewed{
		Pod:  cluster.PodOf(pod, whatever),
		node: pod.Spec.NodeName, agent: c.isReadyAgent(pod), finished: cluster.Finished(pod),
	}
	v.MountsConfig = c.mayMount(pod)
	return v, v.GPU || v.Starting || v.DRA || v.MountsConfig || cluster.IsAgent(pod) || v.Serves || v.Validator
}

// mayMount reports whether a pod mounts our ConfigMap, wherever that is.
func (c *Controller) mayMount(pod *corev1.Pod) bool {
	for _, name := range c.PluginConfig.ConfigMapNames() {
		if cluster.Mounts(pod, name) {
			return true
		}
	}
	return false
}

// ownAnnotations are those of ours and NVIDIA's, and those that report that a node is under maintenance or has another
// owner of its memory.
func ownAnnotations(all map[string]string) map[string]string {
	own := map[string]string{}
	for name, value := range all {
		if strings.HasPrefix(name, v1alpha1.Group+"/") || strings.HasPrefix(name, cluster.NvidiaDomain) || cluster.OfMaintenance(name) || cluster.OfMachine(name) ||
			autoscaling.OfGroup(name) {
			own[name] = value
		}
		if cluster.OfMemoryOwner(name) {
			own[name] = "" // it is long, and says nothing more
		}
	}
	return own
}

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
