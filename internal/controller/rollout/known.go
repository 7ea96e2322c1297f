// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// known is what the last pass made of each node in the cache. The next makes it anew only of what has another resource
// version, and tells rollout.Memory by the version of the node.
type known struct {
	configMap types.NamespacedName // ours: whether a pod mounts it depends on its name
	nodes     map[string]reading
	versions  int64
}

// reading is a node as it was read, and what tells whether that holds.
type reading struct {
	node, gpuNode string // resource versions
	pods          int64  // see podChanges
	world         rollout.Node
}

// begin forgets everything if our ConfigMap is another one.
func (k *known) begin(configMap types.NamespacedName) {
	if k.nodes == nil || k.configMap != configMap {
		k.nodes, k.configMap = map[string]reading{}, configMap
	}
}

// find is what is known of a node whose pods have changed so many times; ok is false if that no longer holds.
func (k *known) find(node *corev1.Node, gpuNode *v1alpha1.GPUNode, pods int64) (n rollout.Node, ok bool) {
	r, found := k.nodes[node.Name]
	same := r.node == node.ResourceVersion && r.gpuNode == gpuNode.ResourceVersion && r.pods == pods
	return r.world, found && same && pods != notCounted
}

// keep keeps a node that was read anew, under another version.
func (k *known) keep(node *corev1.Node, gpuNode *v1alpha1.GPUNode, pods int64, n rollout.Node) rollout.Node {
	k.versions++
	n.Version = k.versions
	k.nodes[n.Name] = reading{node: node.ResourceVersion, gpuNode: gpuNode.ResourceVersion, pods: pods, world: n}
	return n
}

// end forgets the nodes that are gone.
func (k *known) end(there map[string]*corev1.Node) {
	for name := range k.nodes {
		if _, found := there[name]; !found {
			delete(k.nodes, name)
		}
	}
}

// podChanges counts how often something about the pods of each node has changed, whatever it is: the cache holds a change
// before it is counted. So pods are not listed again on nodes where the count is the same.
type podChanges struct {
	mu     sync.Mutex
	counts map[string]int64 // by node; nil: nobody counts
}

// notCounted is the count while the pods are not watched: what is known of them never holds.
const notCounted = -1

func (p *podChanges) of(node string) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.counts == nil {
		return notCounted
	}
	return p.counts[node]
}

func (p *podChanges) count(o client.Object) {
	pod, isPod := o.(*corev1.Pod)
	if !isPod || pod.Spec.NodeName == "" {
		return
	}
	p.changed(pod.Spec.NodeName)
}

// changed counts a change of what is known of the pods on a node.
func (p *podChanges) changed(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.counts != nil {
		p.counts[node]++
	}
}

// watched begins to count. The handler counts every change, and passes those on that matter to a decision.
func (p *podChanges) watched(matters predicate.Predicate) handler.TypedEventHandler[client.Object, Pass] {
	p.counts = map[string]int64{}
	type queue = workqueue.TypedRateLimitingInterface[Pass]
	next := wake()
	return handler.TypedFuncs[client.Object, Pass]{
		CreateFunc: func(ctx context.Context, e event.TypedCreateEvent[client.Object], q queue) {
			if p.count(e.Object); matters.Create(e) {
				next.Create(ctx, e, q)
			}
		},
		UpdateFunc: func(ctx context.Context, e event.TypedUpdateEvent[client.Object], q queue) {
			if p.count(e.ObjectNew); matters.Update(e) {
				next.Update(ctx, e, q)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.TypedDeleteEvent[client.Object], q queue) {
			if p.count(e.Object); matters.Delete(e) {
				next.Delete(ctx, e, q)
			}
		},
	}
}
