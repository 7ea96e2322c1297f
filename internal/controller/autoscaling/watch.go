// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// gathering is how long events are collected before a reconcile. A reconcile goes over all nodes, and autoscalers look
// every ten seconds.
const gathering = time.Second

// Register makes the controller, and the cache that it reads the objects of autoscalers from, run in a manager.
func (c *Controller) Register(mgr manager.Manager) error {
	if err := mgr.Add(c.kinds.cache); err != nil {
		return fmt.Errorf("adding the cache for the objects of autoscalers: %w", err)
	}
	return builder.TypedControllerManagedBy[Request](mgr).
		Named(c.Name()).
		WithOptions(controller.TypedOptions[Request]{MaxConcurrentReconciles: 1, ReconciliationTimeout: reconcileTimeout, RateLimiter: queueOptions()}).
		Watches(&v1alpha1.GPUSharingPolicy{}, wake(), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.GPUNode{}, wake(), builder.WithPredicates(updates(sameGPUs))).
		Watches(&corev1.Node{}, wake(), builder.WithPredicates(updates(sameNode))).
		Watches(&corev1.Pod{}, wake(), builder.WithPredicates(discovers())).
		Watches(pluginconfig.Definitions(), wake(), builder.WithPredicates(predicate.ResourceVersionChangedPredicate{})).
		WatchesRawSource(source.TypedFunc[Request](func(_ context.Context, queue workqueue.TypedRateLimitingInterface[Request]) error {
			c.kinds.wake = func() { queue.AddAfter(Request{}, gathering) }
			return nil
		})).
		Complete(c)
}

// wake puts the one request into the queue, once for all that happens within a short time.
func wake() handler.TypedEventHandler[client.Object, Request] {
	type queue = workqueue.TypedRateLimitingInterface[Request]
	add := func(q queue) { q.AddAfter(Request{}, gathering) }
	return handler.TypedFuncs[client.Object, Request]{
		CreateFunc:  func(_ context.Context, _ event.TypedCreateEvent[client.Object], q queue) { add(q) },
		UpdateFunc:  func(_ context.Context, _ event.TypedUpdateEvent[client.Object], q queue) { add(q) },
		DeleteFunc:  func(_ context.Context, _ event.TypedDeleteEvent[client.Object], q queue) { add(q) },
		GenericFunc: func(_ context.Context, _ event.TypedGenericEvent[client.Object], q queue) { add(q) },
	}
}

// discovers lets pods of Node Feature Discovery pass that come or go.
func discovers() predicate.Predicate {
	is := func(o client.Object) bool { return o.GetLabels()[cluster.LabelName] == cluster.FeatureDiscovery }
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return is(e.Object) }, DeleteFunc: func(e event.DeleteEvent) bool { return is(e.Object) },
		UpdateFunc: func(event.UpdateEvent) bool { return false },
	}
}

// updates leaves out updates of objects that stay the same.
func updates(same func(a, b client.Object) bool) predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return !same(e.ObjectOld, e.ObjectNew) }}
}

// sameGPUs reports whether a GPUNode has as many GPUs as before. A GPU of another product comes with another machine,
// whose GPUNode is new.
func sameGPUs(a, b client.Object) bool {
	was, areNodes := a.(*v1alpha1.GPUNode)
	is, all := b.(*v1alpha1.GPUNode)
	if !areNodes || !all || len(was.Status.Devices) != len(is.Status.Devices) {
		return false
	}
	for i := range is.Status.Devices {
		if was.Status.Devices[i].Product != is.Status.Devices[i].Product || len(was.Status.Devices[i].Profiles) != len(is.Status.Devices[i].Profiles) {
			return false
		}
	}
	return true
}

// sameNode reports whether a Node has the labels, the group and the extended resources that it had.
func sameNode(a, b client.Object) bool {
	was, areNodes := a.(*corev1.Node)
	is, all := b.(*corev1.Node)
	return areNodes && all && maps.Equal(a.GetLabels(), b.GetLabels()) && maps.Equal(groupOf(a), groupOf(b)) &&
		maps.Equal(offers(was), offers(is))
}

func groupOf(node client.Object) map[string]string {
	of := map[string]string{}
	for key, value := range node.GetAnnotations() {
		if autoscaling.OfGroup(key) {
			of[key] = value
		}
	}
	return of
}

func offers(node *corev1.Node) map[corev1.ResourceName]int64 {
	counts := map[corev1.ResourceName]int64{}
	for name, quantity := range node.Status.Allocatable {
		if strings.HasPrefix(string(name), "nvidia.com/") {
			counts[name] = quantity.Value()
		}
	}
	return counts
}
