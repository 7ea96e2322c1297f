// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

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
	told, err := c.metrics.register(registry.Registry)
	if err != nil {
		return err
	}
	c.metrics = told
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
