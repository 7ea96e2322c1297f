// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"math/rand/v2"
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
		c.cache.forgets = true
		history.Play(c, historyOf(seed), happenings(), lateHappenings(), driverHappenings())
		if strings.Contains(c.broken, "are disturbed, and it allows") {
			t.Log(seed, c.broken)
			return
		}
	}
	t.Error("no budget was exceeded")
}

// simulation is a cluster in miniature whose controller reads a cache.
type simulation struct {
	*site
	random *rand.Rand
	fresh  int // of so many objects one is read late
	cache  cached
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
func (s *simulation) lead() {
	s.cache = cached{
		nodes: map[string]cluster.Node{}, gpus: map[string]v1alpha1.GPUNode{}, pods: map[string]cluster.Node{},
		features: map[string]cluster.NodeFeatures{}, version: map[string]int{}, forgets: s.cache.forgets,
	}
	s.read(func() bool { return true })
}

// read brings some objects of the cache up to date.
func (s *simulation) read(some func() bool) {
	c := &s.cache
	for _, name := range slices.Sorted(maps.Keys(s.hosts)) {
		h := s.hosts[name]
		n, known := c.nodes[name]
		n = h.copiedUnless(n)
		if some() || !known {
			c.nodes[name], c.version[name] = n, s.version[name]
		}
		if was := c.gpus[name]; (some() || !known) && !equal(&was, &h.GPU) {
			c.gpus[name] = *h.GPU.DeepCopy()
		}
		if some() || !known {
			c.pods[name] = n
		}
		if some() || !known {
			c.features[name] = n.Features
		}
	}
	maps.DeleteFunc(c.nodes, func(name string, _ cluster.Node) bool { return s.hosts[name] == nil })
	if some() {
		c.policies = nil
		for i := range s.Policies {
			c.policies = append(c.policies, *s.Policies[i].DeepCopy())
		}
	}
}

// wrote shows the cache an object as the controller has just written it.
func (s *simulation) wrote(a action.Action) {
	h := s.hosts[a.NodeName()]
	if h == nil || s.cache.forgets {
		return
	}
	switch a.(type) {
	case action.PatchNode, action.Taint, action.Untaint, action.TaintDevices, action.UntaintDevices:
		s.cache.nodes[h.Name], s.cache.version[h.Name] = h.alone(), s.version[h.Name]
	case action.AllowMPS:
		f := s.cache.features[h.Name]
		f.OverriddenSince = time.Time{}
		s.cache.features[h.Name] = f
	case action.SetSpec:
		s.cache.gpus[h.Name] = *h.GPU.DeepCopy()
	}
}

// known is the snapshot as the cache has it.
func (s *simulation) known() cluster.Snapshot {
	snapshot := s.withoutNodes()
	snapshot.Policies = s.cache.policies
	for _, name := range slices.Sorted(maps.Keys(s.cache.nodes)) {
		n := s.cache.nodes[name]
		n.Pods, n.AgentReady, n.AgentSince = s.cache.pods[name].Pods, s.cache.pods[name].AgentReady, s.cache.pods[name].AgentSince
		n.Features = s.cache.features[name]
		if h := s.hosts[name]; h == nil || !h.withoutGPUNode {
			n.GPU = s.cache.gpus[name]
			snapshot.Nodes = append(snapshot.Nodes, s.reads.joined(n)) // as NodeOf joins a Node and its GPUNode
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
