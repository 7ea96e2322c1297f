// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

const (
	// gathering is how long events are collected before a reconcile, which goes over all GPUNodes.
	gathering        = time.Second
	reconcileTimeout = time.Minute
	minBackoff       = 500 * time.Millisecond
	maxBackoff       = time.Minute
)

// Register makes the controller run in a manager.
func (c *Controller) Register(mgr manager.Manager) error {
	shared, err := c.metrics.register(registry.Registry)
	if err != nil {
		return err
	}
	c.metrics = shared
	return builder.TypedControllerManagedBy[Request](mgr).
		Named(c.Name()).
		WithOptions(controller.TypedOptions[Request]{
			MaxConcurrentReconciles: 1, ReconciliationTimeout: reconcileTimeout,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[Request](minBackoff, maxBackoff),
		}).
		Watches(&v1alpha1.GPUSharingPolicy{}, wake(), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.GPUNode{}, wake(), builder.WithPredicates(predicate.Funcs{UpdateFunc: differs})).
		Complete(c)
}

// differs reports whether what a reconcile reads of a GPUNode has changed.
func differs(e event.UpdateEvent) bool {
	was, areNodes := e.ObjectOld.(*v1alpha1.GPUNode)
	is, all := e.ObjectNew.(*v1alpha1.GPUNode)
	return !areNodes || !all || was.Spec.PolicyName != is.Spec.PolicyName || measured(was) != measured(is) ||
		!equality.Semantic.DeepEqual(was.Status.MemoryPressure, is.Status.MemoryPressure)
}

// measured reports whether a node has no guard, or its agent reports that it measures.
func measured(n *v1alpha1.GPUNode) bool {
	return !n.Spec.Memory.Guarded() || condition.IsTrueAt(n.Status.Conditions, v1alpha1.ConditionMemoryGuarded, n.Generation)
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
