// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// nodeStore is what the controller has read of all nodes from the cache. A reconcile reads again only what has changed,
// and gives that another version, by which rollout.Memory tells it. To list thousands of nodes costs more than to
// decide about them.
type nodeStore struct {
	complete bool             // everything was read, and no error came in between
	programs cluster.Programs // by which pods were read
	nodes    map[string]*corev1.Node
	gpuNodes map[string]*v1alpha1.GPUNode
	listed   []cluster.Node       // nodes with a GPUNode, by name, and those that lack one for too long
	lost     map[string]time.Time // nodes that the operator changed and that have no GPUNode: when that was first seen
	versions int64

	claims map[string]string // by which pods have GPUs, by UID

	unscheduled        []cluster.Pod
	unscheduledVersion int64
}

func (k *nodeStore) version() int64 {
	k.versions++
	return k.versions
}

// put adds the nodes that were read, in place of those of the same names, and removes others.
func (k *nodeStore) put(read []cluster.Node, gone map[string]bool) {
	var added []cluster.Node
	for _, n := range read {
		n.Version = k.version()
		if at, found := slices.BinarySearchFunc(k.listed, n.Name, byName); found {
			k.listed[at] = n
		} else {
			added = append(added, n)
		}
	}
	if len(gone) > 0 {
		k.listed = slices.DeleteFunc(k.listed, func(n cluster.Node) bool { return gone[n.Name] })
	}
	if len(added) > 0 {
		k.listed = append(k.listed, added...)
		slices.SortFunc(k.listed, func(a, b cluster.Node) int { return cmp.Compare(a.Name, b.Name) })
	}
}

// lostDeadline is how long the controller of GPUNodes may take to make one again. It takes milliseconds, unless the API
// server refuses it.
const lostDeadline = 10 * time.Second

// lose notes a node without a GPUNode, if the operator has changed it, by when that was seen first, if it was.
func (k *nodeStore) lose(node *corev1.Node, since, now time.Time) {
	if node.Annotations[v1alpha1.AnnotationBaseline] == "" || node.DeletionTimestamp != nil {
		return
	}
	if since.IsZero() {
		since = now
	}
	k.lost[node.Name] = since
}

// missing is an error if a node that the operator changed has no GPUNode yet: it would be taken for one that was never
// changed, and what is restored once no node is changed would be restored too early. The controller of GPUNodes makes
// it again. One that cannot be made in time costs its own node only (readLost).
func (k *nodeStore) missing(now time.Time) error {
	var awaited []string
	for name, since := range k.lost {
		if now.Sub(since) < lostDeadline {
			awaited = append(awaited, name)
		}
	}
	if len(awaited) == 0 {
		return nil
	}
	slices.Sort(awaited)
	return fmt.Errorf("GPUNode of %s is %w", format.List(awaited), pluginconfig.ErrNotSynced)
}

// readLost reads the nodes whose GPUNode could not be made again in time. They are decided upon as they are, so that
// what they hold counts, and nothing is asked of their agents.
func (c *Controller) readLost(ctx context.Context, now time.Time) error {
	k := &c.store
	var read []cluster.Node
	for name, since := range k.lost {
		if now.Sub(since) < lostDeadline {
			continue
		}
		node := &corev1.Node{}
		there, err := c.cached(ctx, name, node)
		if err != nil {
			return err
		}
		if !there {
			continue
		}
		n, err := c.readNode(ctx, node, &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}})
		if err != nil {
			return err
		}
		n.NoGPUNode = true
		k.nodes[name] = node
		read = append(read, n)
	}
	k.put(read, nil)
	return nil
}

func byName(n cluster.Node, name string) int { return cmp.Compare(n.Name, name) }

// mergeFeatures records what other objects report of each node.
func (k *nodeStore) mergeFeatures(features map[string]cluster.NodeFeatures, dra map[string]cluster.DRANode) {
	for i := range k.listed {
		n := &k.listed[i]
		f, d := features[n.Name], dra[n.Name]
		if n.Features != f || !reflect.DeepEqual(n.DRANode, d) {
			n.Features, n.DRANode, n.Version = f, d, k.version()
		}
	}
}

// claim records by which ResourceClaims pods have GPUs, and notes the nodes of pods of which that has changed.
func (k *nodeStore) claim(claims map[string]string, changed changedNodes) {
	if maps.Equal(claims, k.claims) {
		return
	}
	for i := range k.listed {
		n := &k.listed[i]
		differs := func(p cluster.Pod) bool { return cluster.ClaimOf(&p, claims) != cluster.ClaimOf(&p, k.claims) }
		if slices.ContainsFunc(n.Pods, differs) {
			changed.nodes[n.Name] = true
		}
	}
	k.claims = claims
}

// readAll reads all nodes.
func (c *Controller) readAll(ctx context.Context, now time.Time) error {
	nodes, gpuNodes := &corev1.NodeList{}, &v1alpha1.GPUNodeList{}
	if err := c.client.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading nodes: %w", err)
	}
	if err := c.client.List(ctx, gpuNodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading GPUNodes: %w", err)
	}
	k := &c.store
	k.nodes, k.gpuNodes, k.listed = map[string]*corev1.Node{}, cluster.ByName(gpuNodes.Items), nil
	lost := k.lost
	k.lost = map[string]time.Time{}
	var read []cluster.Node
	for i := range nodes.Items {
		node := &nodes.Items[i]
		gpuNode, hasGPUs := k.gpuNodes[node.Name]
		if !hasGPUs {
			k.lose(node, lost[node.Name], now)
			continue
		}
		k.nodes[node.Name] = node
		n, err := c.readNode(ctx, node, gpuNode)
		if err != nil {
			return err
		}
		read = append(read, n)
	}
	k.put(read, nil)
	return c.readUnscheduled(ctx)
}

// readAgain reads the nodes that have changed.
func (c *Controller) readAgain(ctx context.Context, changed changedNodes, now time.Time) error {
	k, gone := &c.store, map[string]bool{}
	var read []cluster.Node
	for name, matters := range changed.nodes {
		node, gpuNode := &corev1.Node{}, &v1alpha1.GPUNode{}
		there, err := c.cached(ctx, name, node)
		if err != nil {
			return err
		}
		hasGPUs, err := c.cached(ctx, name, gpuNode)
		if err != nil {
			return err
		}
		delete(k.nodes, name)
		delete(k.gpuNodes, name)
		since := k.lost[name]
		delete(k.lost, name)
		if hasGPUs {
			k.gpuNodes[name] = gpuNode
		} else if there {
			k.lose(node, since, now)
		}
		if !there || !hasGPUs {
			gone[name] = true
			continue
		}
		k.nodes[name] = node // also for the resource version, which a write may name
		if !matters {
			continue
		}
		n, err := c.readNode(ctx, node, gpuNode)
		if err != nil {
			return err
		}
		read = append(read, n)
	}
	k.put(read, gone)
	if changed.unscheduled {
		return c.readUnscheduled(ctx)
	}
	return nil
}

func (c *Controller) cached(ctx context.Context, name string, into client.Object) (there bool, err error) {
	err = c.client.Get(ctx, types.NamespacedName{Name: name}, into, client.UnsafeDisableDeepCopy)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading %T %s: %w", into, name, err)
	}
	return true, nil
}

// readNode reads a node with its pods. What other objects report of it stays as it was.
func (c *Controller) readNode(ctx context.Context, node *corev1.Node, gpuNode *v1alpha1.GPUNode) (cluster.Node, error) {
	n := cluster.NodeOf(node, gpuNode)
	if at, found := slices.BinarySearchFunc(c.store.listed, n.Name, byName); found {
		was := &c.store.listed[at]
		n.Features, n.DRANode = was.Features, was.DRANode
	}
	pods := &corev1.PodList{}
	if err := c.client.List(ctx, pods, client.MatchingFields{nodeNameField: n.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return n, fmt.Errorf("reading the pods on node %s: %w", n.Name, err)
	}
	n.Pods = make([]cluster.Pod, 0, len(pods.Items))
	for i := range pods.Items {
		n.AddPod(&pods.Items[i], &c.store.programs)
	}
	for i := range n.Pods {
		p := &n.Pods[i]
		p.Refused, p.Claim = c.refusals.of(p.UID), cluster.ClaimOf(p, c.store.claims)
	}
	return n, nil
}

// readUnscheduled reads the pods that ask for GPUs and are on no node.
func (c *Controller) readUnscheduled(ctx context.Context) error {
	pods := &corev1.PodList{}
	if err := c.client.List(ctx, pods, client.MatchingFields{nodeNameField: ""}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading the pods that are on no node: %w", err)
	}
	k := &c.store
	k.unscheduled, k.unscheduledVersion = nil, k.version()
	for i := range pods.Items {
		if pod := &pods.Items[i]; cluster.Waits(pod) {
			k.unscheduled = append(k.unscheduled, cluster.PodOf(pod, &k.programs))
		}
	}
	return nil
}

// changes notes which nodes have changed since the last reconcile read them: what the watches report, and what the
// controller writes. The cache holds a change before it is noted. The watch may report a write of ours late, so that is
// noted with the write: once the cache shows it (cacheBarrier), the next reconcile reads it.
type changes struct {
	mu      sync.Mutex
	watched bool // false: nobody reports changes, so everything is read each time
	since   changedNodes
	// rebootDue are the nodes of which a GPU waits for a reboot, by name. The reboot may wait for any pod there, so
	// each wakes the controller; elsewhere those do that a decision depends on.
	rebootDue map[string]bool
}

type changedNodes struct {
	nodes       map[string]bool // by name; false: nothing that a decision depends on, such as a heartbeat
	unscheduled bool            // a pod that asks for GPUs and is on no node
}

// take returns the changes that were noted and begins anew. It is called before anything is read.
func (c *changes) take() (changed changedNodes, watched bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	changed, c.since = c.since, changedNodes{nodes: map[string]bool{}}
	return changed, c.watched
}

func (c *changes) node(name string, matters bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.since.nodes == nil {
		c.since.nodes = map[string]bool{}
	}
	c.since.nodes[name] = c.since.nodes[name] || matters
}

// note notes that an object was created, changed or deleted.
func (c *changes) note(o client.Object, matters bool) {
	pod, isPod := o.(*corev1.Pod)
	switch {
	case !isPod:
		c.node(o.GetName(), matters)
	case pod.Spec.NodeName != "": // whatever it is that has changed
		c.node(pod.Spec.NodeName, true)
	case cluster.RequestsGPU(&pod.Spec):
		c.mu.Lock()
		defer c.mu.Unlock()
		c.since.unscheduled = true
	}
}

// rebootPending notes whether a node is due to be rebooted, by its GPUNode, and reports of a pod whether it is on such
// a node.
func (c *changes) rebootPending(o client.Object, gone bool) (wakes bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch o := o.(type) {
	case *corev1.Pod:
		return c.rebootDue[o.Spec.NodeName] && cluster.Drains(o)
	case *v1alpha1.GPUNode:
		switch {
		case gone || !condition.IsTrue(o.Status.Conditions, v1alpha1.ConditionRebootRequired):
			delete(c.rebootDue, o.Name)
		case c.rebootDue == nil:
			c.rebootDue = map[string]bool{o.Name: true}
		default:
			c.rebootDue[o.Name] = true
		}
	}
	return false
}

// whatever a pod may be: what it looks like wakes the controller, which then asks what it is.
var whatever = &cluster.Programs{Unverified: true}

// blocksAnew reports whether a pod differs in what the drain of its node depends on. Most updates of a pod, as of its
// readiness, are of nothing else.
func blocksAnew(e event.TypedUpdateEvent[client.Object]) bool {
	old, isPod := e.ObjectOld.(*corev1.Pod)
	updated, still := e.ObjectNew.(*corev1.Pod)
	return !isPod || !still || old.UID != updated.UID || old.Spec.NodeName != updated.Spec.NodeName || cluster.Finished(old) != cluster.Finished(updated) ||
		!reflect.DeepEqual(cluster.PodOf(old, whatever), cluster.PodOf(updated, whatever))
}

// watch begins to note. The handler notes every change, and triggers a reconcile for those that matter to a decision.
func (c *changes) watch(matters predicate.Predicate) handler.TypedEventHandler[client.Object, Request] {
	c.watched = true
	type queue = workqueue.TypedRateLimitingInterface[Request]
	next := wake()
	return handler.TypedFuncs[client.Object, Request]{
		CreateFunc: func(ctx context.Context, e event.TypedCreateEvent[client.Object], q queue) {
			wakes := c.rebootPending(e.Object, false)
			if c.note(e.Object, true); wakes || matters.Create(e) {
				next.Create(ctx, e, q)
			}
		},
		UpdateFunc: func(ctx context.Context, e event.TypedUpdateEvent[client.Object], q queue) {
			does := c.rebootPending(e.ObjectNew, false) && blocksAnew(e) || matters.Update(e)
			c.note(e.ObjectOld, does || !isNode(e.ObjectOld)) // a pod that was on no node may be on one
			if c.note(e.ObjectNew, does || !isNode(e.ObjectNew)); does {
				next.Update(ctx, e, q)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.TypedDeleteEvent[client.Object], q queue) {
			wakes := c.rebootPending(e.Object, true)
			if c.note(e.Object, true); wakes || matters.Delete(e) {
				next.Delete(ctx, e, q)
			}
		},
	}
}

// isNode reports whether nodeView holds all that decisions depend on: of a GPUNode they depend on annotations too that
// wake nobody.
func isNode(o client.Object) bool {
	_, is := o.(*corev1.Node)
	return is
}
