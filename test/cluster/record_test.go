// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/invariant"
)

// record is everything that happened to Nodes and GPUNodes, as the API server tells its watchers. Resource versions are
// the order in which it happened, of both kinds together, so that what was so at any moment can be told afterwards.
type record struct {
	f  *fleet
	mu sync.Mutex

	happened []happening
	from     int // where the current account begins
}

type happening struct {
	version uint64
	node    string
	deleted bool
	is      *corev1.Node      // as it became; nil: the GPUNode changed
	gpu     *v1alpha1.GPUNode // likewise
}

func newRecord(f *fleet) *record {
	r := &record{f: f}
	r.resume()
	return r
}

// resume watches, anew after the API server was away.
func (r *record) resume() {
	r.f.t.Helper()
	for _, list := range []client.ObjectList{&corev1.NodeList{}, &v1alpha1.GPUNodeList{}} {
		r.watch(list)
	}
}

func (r *record) watch(list client.ObjectList) {
	r.f.t.Helper()
	w, err := r.f.client.Watch(context.Background(), list)
	r.f.Expect(err).NotTo(HaveOccurred())
	r.f.t.Cleanup(w.Stop)
	go func() {
		for e := range w.ResultChan() {
			r.add(e)
		}
	}()
}

func (r *record) add(e watch.Event) {
	o, is := e.Object.(client.Object)
	if !is {
		return
	}
	version, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	if err != nil {
		return
	}
	h := happening{version: version, node: o.GetName(), deleted: e.Type == watch.Deleted}
	h.is, _ = o.(*corev1.Node)
	h.gpu, _ = o.(*v1alpha1.GPUNode)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.happened = append(r.happened, h)
}

// begin begins an account.
func (r *record) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.SortStableFunc(r.happened, func(a, b happening) int { return cmp.Compare(a.version, b.version) })
	r.from = len(r.happened)
}

// behind is by how many changes of an object the cache of the controller may be behind.
const behind = 8

// mustReboot reports whether one of the last changes of a GPUNode left it with the report that its node must be
// rebooted.
func (r *record) mustReboot(of string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := 0
	for _, h := range slices.Backward(r.happened) {
		if h.gpu == nil || h.node != of {
			continue
		}
		if rebootRequired(h.gpu) {
			return true
		}
		if seen++; seen == behind {
			return false
		}
	}
	return false
}

// account is what a rollout did to the nodes.
type account struct {
	most    int      // nodes that were changing at the same moment
	order   []string // nodes, as their changes began
	alone   bool     // the first one was done before the second began
	tainted []string // nodes that were tainted
}

// account tells what happened since begin, except to some nodes.
func (r *record) account(except ...string) account {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.SortStableFunc(r.happened, func(a, b happening) int { return cmp.Compare(a.version, b.version) })
	a := account{alone: true}
	nodes, gpus, changing, tainted := map[string]*corev1.Node{}, map[string]*v1alpha1.GPUNode{}, map[string]bool{}, map[string]bool{}
	unsupported := r.unsupported()
	for i, h := range r.happened {
		if h.is != nil {
			nodes[h.node] = h.is
		} else {
			gpus[h.node] = h.gpu
		}
		if h.deleted {
			delete(nodes, h.node)
			delete(gpus, h.node)
		}
		if i < r.from || nodes[h.node] == nil || gpus[h.node] == nil || slices.Contains(except, h.node) {
			delete(changing, h.node)
			continue
		}
		n := cluster.NodeOf(nodes[h.node], gpus[h.node])
		if slices.ContainsFunc(n.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }) {
			tainted[n.Name] = true
		}
		if !invariant.Disturbed(n) && (!underway(&n.GPU) || unsupported[i]) {
			delete(changing, n.Name)
			continue
		}
		changing[n.Name] = true
		a.most = max(a.most, len(changing))
		if !slices.Contains(a.order, n.Name) {
			a.alone = a.alone && (len(a.order) != 1 || !changing[a.order[0]])
			a.order = append(a.order, n.Name)
		}
	}
	a.tainted = slices.Sorted(maps.Keys(tainted))
	return a
}

// unsupported are the moments at which a node was reported as Unsupported for what is asked of it, or is reported so next: the report comes
// after the decision.
func (r *record) unsupported() []bool {
	type report struct {
		state      string
		generation int64
	}
	is, such := make([]bool, len(r.happened)), make([]report, len(r.happened))
	asked, said := map[string]report{}, map[string]report{}
	of := func(n *v1alpha1.GPUNode) report { return report{n.Status.Rollout.State, n.Status.ObservedGeneration} }
	for i, h := range r.happened {
		if h.gpu != nil {
			if asked[h.node] = (report{string(node.Unsupported), h.gpu.Generation}); of(h.gpu) == asked[h.node] {
				said[h.node] = of(h.gpu)
			}
		}
		such[i], is[i] = asked[h.node], asked[h.node] == said[h.node]
	}
	next := map[string][]report{} // of each node the one that stands or comes, and the one after it
	for i, h := range slices.Backward(r.happened) {
		if then := next[h.node]; h.gpu != nil && (len(then) == 0 || of(h.gpu) != then[0]) {
			next[h.node] = append([]report{of(h.gpu)}, then[:min(1, len(then))]...)
		}
		is[i] = is[i] || slices.Contains(next[h.node], such[i])
	}
	return is
}

// underway reports whether a GPUNode asks for something that is not reached.
func underway(n *v1alpha1.GPUNode) bool {
	spec := n.Spec
	if spec.PolicyName == "" || spec.ConfigName == "" {
		return false
	}
	good := n.Status.Rollout.LastGood
	return good == nil || good.ConfigName != spec.ConfigName || !equality.Semantic.DeepEqual(good.Devices, spec.Devices)
}

// settled waits until nothing has happened to a node for a while.
func (f *fleet) settled() {
	f.t.Helper()
	count := func() int {
		f.record.mu.Lock()
		defer f.record.mu.Unlock()
		return len(f.record.happened)
	}
	last, since := count(), time.Now()
	f.Eventually(func() bool {
		if now := count(); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > 1500*time.Millisecond
	}, patience, pollEvery).Should(BeTrue())
}

// intact checks what holds once nothing goes on any more.
func (f *fleet) intact() {
	f.t.Helper()
	f.settled()
	f.Expect(f.cluster.Denied(f.t.Context(), env.ControllerWrites)).To(BeZero(), "writes that config/manager/admission.yaml does not list")
	f.Eventually(func() []string { return invariant.Broken(f.before, f.world(), f.evicted...) }, patience, pollEvery).Should(BeEmpty())
}
