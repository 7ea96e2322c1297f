// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"context"
	"fmt"
	"maps"
	"math"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

const (
	// gathering is how long events are collected before a reconcile: pods come in groups, and the scheduler looks at one
	// after the other.
	gathering        = 2 * time.Second
	reconcileTimeout = time.Minute
	minBackoff       = 500 * time.Millisecond
	maxBackoff       = time.Minute
)

// Register makes the controller run in a manager, after the controller of policies.
func (c *Controller) Register(mgr manager.Manager) error {
	shared, err := c.metrics.register(registry.Registry)
	if err != nil {
		return err
	}
	c.metrics = shared
	namespace := &metav1.PartialObjectMetadata{}
	namespace.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	return builder.TypedControllerManagedBy[Request](mgr).
		Named(c.Name()).
		WithOptions(controller.TypedOptions[Request]{
			MaxConcurrentReconciles: 1, ReconciliationTimeout: reconcileTimeout,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[Request](minBackoff, maxBackoff),
		}).
		Watches(&v1alpha1.GPUSharingPolicy{}, wake(), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.GPUNode{}, wake(), builder.WithPredicates(updates(sameGPUs))).
		Watches(&corev1.Node{}, wake(), builder.WithPredicates(updates(sameNode))).
		Watches(&corev1.Pod{}, wake(), builder.WithPredicates(predicate.NewPredicateFuncs(requestsGPU), updates(samePod))).
		Watches(namespace, wake(), builder.WithPredicates(predicate.LabelChangedPredicate{})).
		Complete(c)
}

// RegisterOff makes a manager remove what the controller reported while the feature gate was on, and try until that has
// succeeded once. It reads past the cache, which holds no policies before the other controllers have started.
func (c *Controller) RegisterOff(mgr manager.Manager) error {
	err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		again := wait.Backoff{Duration: minBackoff, Factor: 2, Steps: math.MaxInt32, Cap: maxBackoff}.DelayFunc()
		_ = again.Until(ctx, true, true, func(ctx context.Context) (bool, error) { // it fails only when the manager ends
			err := c.Withdraw(ctx, mgr.GetAPIReader())
			if err != nil {
				log.FromContext(ctx).Error(err, "Removing status.onDemand of policies failed; it will be tried again")
			}
			return err == nil, nil
		})
		return nil
	}))
	if err != nil {
		return fmt.Errorf("adding what removes status.onDemand: %w", err)
	}
	return nil
}

func namespaceList() *metav1.PartialObjectMetadataList {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NamespaceList"))
	return list
}

// updates leaves out updates of objects that stay the same.
func updates(same func(a, b client.Object) bool) predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return !same(e.ObjectOld, e.ObjectNew) }}
}

func requestsGPU(o client.Object) bool {
	pod, is := o.(*corev1.Pod)
	return is && cluster.RequestsGPU(&pod.Spec)
}

// samePod reports whether a pod waits as before and for the same nodes, or is on the same node and has not finished.
func samePod(a, b client.Object) bool {
	was, arePods := a.(*corev1.Pod)
	is, all := b.(*corev1.Pod)
	return arePods && all && was.UID == is.UID && was.Spec.NodeName == is.Spec.NodeName && cluster.Finished(was) == cluster.Finished(is) &&
		Waits(was) == Waits(is) && equality.Semantic.DeepEqual(was.Spec.Tolerations, is.Spec.Tolerations)
}

// sameGPUs reports whether a GPUNode has the policy, the readiness and the GPUs that it had, who has them, and what was asked of them.
func sameGPUs(a, b client.Object) bool {
	was, areNodes := a.(*v1alpha1.GPUNode)
	is, all := b.(*v1alpha1.GPUNode)
	ready := func(n *v1alpha1.GPUNode) bool { return condition.IsTrue(n.Status.Conditions, v1alpha1.ConditionReady) }
	return areNodes && all && was.Spec.PolicyName == is.Spec.PolicyName && ready(was) == ready(is) &&
		equality.Semantic.DeepEqual(was.Status.Devices, is.Status.Devices) && equality.Semantic.DeepEqual(was.Spec.Devices, is.Spec.Devices) &&
		equality.Semantic.DeepEqual(was.Status.Rollout.Failed, is.Status.Rollout.Failed)
}

// sameNode reports whether a Node would take the pods that it would have taken, and has as many healthy instances.
func sameNode(a, b client.Object) bool {
	was, areNodes := a.(*corev1.Node)
	is, all := b.(*corev1.Node)
	unhealthy := func(node *corev1.Node) map[string]int64 {
		n := cluster.NodeAlone(node)
		return n.Unhealthy(nil)
	}
	return areNodes && all && maps.Equal(was.Labels, is.Labels) && equality.Semantic.DeepEqual(was.Spec.Taints, is.Spec.Taints) &&
		maps.Equal(unhealthy(was), unhealthy(is))
}

// wake puts the one request into the queue, once for all that happens within a short time.
func wake() handler.TypedEventHandler[client.Object, Request] {
	type queue = workqueue.TypedRateLimitingInterface[Request]
	add := func(q queue) { q.AddAfter(Request{}, gathering) }
	return handler.TypedFuncs[client.Object, Request]{
		CreateFunc: func(_ context.Context, _ event.TypedCreateEvent[client.Object], q queue) { add(q) },
		UpdateFunc: func(_ context.Context, _ event.TypedUpdateEvent[client.Object], q queue) { add(q) },
		DeleteFunc: func(_ context.Context, _ event.TypedDeleteEvent[client.Object], q queue) { add(q) },
	}
}
