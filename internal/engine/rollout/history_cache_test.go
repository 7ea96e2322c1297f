// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// TestTheBudgetNeedsTheOwnWrites: were a reconcile to begin before the cache shows what the last one wrote, the same
// slot would be given away twice. So histories would see it.
func TestTheBudgetNeedsTheOwnWrites(t *testing.T) {
	for seed := uint64(1); seed <= 2000; seed++ {
		c := newRun(seed)
		if c.cache.forgets = true; len(c.hosts) < 3 {
			continue
		}
		history.Play(c, historyOf(seed), happenings(), lateHappenings(), driverHappenings())
		if strings.Contains(c.broken, "are disturbed, and it allows") {
			t.Log(seed, c.broken)
			return
		}
	}
	t.Error("no budget was exceeded")
}

// cached is what the controller knows: of each object what it was at some time, no earlier than when the controller
// last wrote it. What others write, it may learn at any time later, of one object before another.
type cached struct {
	nodes    map[string]cluster.Node // labels, annotations, taints and what is advertised
	gpus     map[string]v1alpha1.GPUNode
	pods     map[string]cluster.Node // the pods on the node, and whether its agent is Ready
	features map[string]cluster.NodeFeatures
	version  map[string]int // of each Node
	policies []v1alpha1.GPUSharingPolicy
	forgets  bool // it may lack even what the controller wrote itself: what must not be
}

// lead lets a new controller lead, which waits until its cache shows what the last one wrote.
func (c *run) lead() {
	c.LeadsSince = c.controllersNow()
	c.cache = cached{
		nodes: map[string]cluster.Node{}, gpus: map[string]v1alpha1.GPUNode{}, pods: map[string]cluster.Node{},
		features: map[string]cluster.NodeFeatures{}, version: map[string]int{}, forgets: c.cache.forgets,
	}
	c.read(func() bool { return true })
}

// read brings some objects of the cache up to date.
func (c *run) read(some func() bool) {
	known := &c.cache
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		h := c.hosts[name]
		n, has := known.nodes[name]
		n = h.copiedUnless(n)
		if some() || !has {
			known.nodes[name], known.version[name] = n, c.version[name]
		}
		if was := known.gpus[name]; (some() || !has) && !reflect.DeepEqual(was, h.GPU) {
			known.gpus[name] = *h.GPU.DeepCopy()
		}
		if some() || !has {
			known.pods[name] = n
		}
		if some() || !has {
			known.features[name] = n.Features
		}
	}
	maps.DeleteFunc(known.nodes, func(name string, _ cluster.Node) bool { return c.hosts[name] == nil })
	if some() {
		known.policies = nil
		for i := range c.Policies {
			known.policies = append(known.policies, *c.Policies[i].DeepCopy())
		}
	}
}

// wrote shows the cache an object as the controller has just written it.
func (c *run) wrote(a action.Action) {
	h := c.hosts[a.NodeName()]
	if h == nil || c.cache.forgets {
		return
	}
	switch a.(type) {
	case action.PatchNode, action.Taint, action.Untaint, action.TaintDevices, action.UntaintDevices:
		c.cache.nodes[h.Name], c.cache.version[h.Name] = h.alone(), c.version[h.Name]
	case action.AllowMPS:
		f := c.cache.features[h.Name]
		f.OverriddenSince = time.Time{}
		c.cache.features[h.Name] = f
	case action.SetSpec:
		c.cache.gpus[h.Name] = *h.GPU.DeepCopy()
	}
}

// known is the snapshot as the cache has it.
func (c *run) known() cluster.Snapshot {
	snapshot := c.withoutNodes()
	snapshot.Policies = c.cache.policies
	for _, name := range slices.Sorted(maps.Keys(c.cache.nodes)) {
		n := c.cache.nodes[name]
		n.Pods, n.AgentReady, n.AgentSince = c.cache.pods[name].Pods, c.cache.pods[name].AgentReady, c.cache.pods[name].AgentSince
		n.Features = c.cache.features[name]
		if h := c.hosts[name]; h == nil || !h.withoutGPUNode {
			n.GPU = c.cache.gpus[name]
			snapshot.Nodes = append(snapshot.Nodes, c.reads.joined(&n)) // as NodeOf joins a Node and its GPUNode
		} else if n.Annotations[v1alpha1.AnnotationBaseline] != "" {
			n = n.WithCopy(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}})
			n.NoGPUNode = true
			snapshot.Nodes = append(snapshot.Nodes, n)
		}
	}
	return snapshot
}

// locked reports whether the API server refuses an action when the Node has changed since it was read.
func locked(a action.Action) bool {
	switch a := a.(type) {
	case action.Taint, action.Untaint, action.KeepTaints:
		return true
	case action.PatchNode:
		return a.Locked
	}
	return false
}
