// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"maps"
	"reflect"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// Memory is what one pass leaves to the next, so that a node of which nothing has changed is not looked at again. It
// changes what a decision costs and never what is decided: what it keeps follows from values that are compared first. The
// zero value remembers nothing. It serves one pass at a time.
type Memory struct {
	nodes map[string]*remembered
	queue queue // the pods that wait
	pass  int   // counts passes

	// What concerns all nodes, as the last pass met it. round counts how often that was another than before.
	wiring Wiring // with another one all nodes are forgotten: it hardly ever changes
	ranked string // the signature of the policies
	keys   map[string]string
	round  int
}

// remembered is what memory keeps of a node, at one version of it.
type remembered struct {
	node    *Node // of the last pass that met it
	pass    int
	version int64

	// What follows from the node alone.
	shown    string   // the reason by which another controller shows on it; empty: none does
	mpsUsers []string // the pods that hold GPUs, where NVIDIA's MPS DaemonSet runs

	// What follows from the node and from what concerns all nodes.
	round     int      // in which that was found out
	positions []int    // of the policies that select the node, in the ranking
	derived   *derived // nil for a node that no policy governs and that stays as it is
	member    member   // of the last pass
}

// derived is what was derived of a node that a policy governs or governed, and from what.
type derived struct {
	basis

	selected, target string // content of the key that the node selects, and of the one that it is to select
	view             *view
	tally            tally
	judgement        judgement
	// settled says that the judgement stands until its basis changes: nothing is to be done, and no deadline passes.
	settled bool
	slot    slot
	state   NodeState // of a settled node
	// released is true if the GPUNode records how the policy releases the node.
	released bool
}

// basis names all that the view of a node depends on, besides the Node, the wiring and the content of its keys. What is not in it
// a view must not read: the time, above all.
type basis struct {
	sighting   // of another controller that is not recorded on the Node
	policy     types.UID
	name       string // of the policy
	generation int64
}

func basisOf(w *World, n *Node, by *v1alpha1.GPUSharingPolicy) basis {
	b := basis{sighting: w.Sightings.of(n)}
	if by != nil {
		b.policy, b.name, b.generation = by.UID, by.Name, by.Generation
	}
	return b
}

// begin begins a pass.
func (memory *Memory) begin(w *World, ranking policy.Ranking) {
	memory.pass++
	if memory.nodes == nil || !reflect.DeepEqual(w.Wiring, memory.wiring) {
		memory.nodes, memory.wiring = map[string]*remembered{}, w.Wiring
	}
	if signature := ranking.Signature(); signature != memory.ranked || !maps.Equal(w.Keys, memory.keys) {
		memory.ranked, memory.keys = signature, maps.Clone(w.Keys)
		memory.round++
	}
}

// meet finds what is remembered of a node.
func (memory *Memory) meet(n *Node) *remembered {
	r := memory.nodes[n.Name]
	if r == nil || n.Version == 0 || r.version != n.Version {
		r = &remembered{version: n.Version, round: -1}
		r.shown, _ = shownBy(n)
		if servedByMPS(n.Pods) {
			r.mpsUsers = usersOn(n)
		}
		memory.nodes[n.Name] = r
	}
	r.node, r.pass = n, memory.pass
	return r
}

// end forgets the nodes that the pass, over so many, did not meet.
func (memory *Memory) end(met int) {
	if len(memory.nodes) > met {
		maps.DeleteFunc(memory.nodes, func(_ string, r *remembered) bool { return r.pass != memory.pass })
	}
}

// place puts a node into the group that paces it, and finds out about it what does not stand from the last pass.
func (memory *Memory) place(w *World, r *remembered, in placing) *member {
	n, m := r.node, &r.member
	if r.round != memory.round {
		r.round, r.positions, m.still = memory.round, in.ranking.Selecting(policyNode(n)), false
	}
	selected := in.ranking.Governed(r.positions)
	governed := selected
	if w.Wiring.Reason != "" {
		governed = policy.Governed{}
	}
	if m.still && w.Sightings.of(n) == (sighting{}) {
		m.world, m.node, m.by, m.over = w, n, governed.By, governed.Over
	} else {
		r.consider(w, selected, governed, in)
	}
	for _, loser := range governed.Over {
		in.groups[loser.Name].lost = append(in.groups[loser.Name].lost, lost{node: n.Name, to: governed.By.Name})
	}
	if w.Wiring.Reason == "" && governed.By == nil && !policy.OptedOut(n.Labels) {
		if p := in.ranking.Awaits(policyNode(n)); p != nil && p.Spec.GPUSelector != nil {
			in.groups[p.Name].awaited = append(in.groups[p.Name].awaited, n.Name)
		}
	}
	g := in.group(owner(n, governed.By))
	switch {
	case r.derived == nil:
		g.idle = append(g.idle, m)
		return m
	case governed.By == nil:
		g.leaving = append(g.leaving, m)
		return m
	}
	if m.heldByOther() {
		of, held := in.group(n.ChangedFor), *m
		of.counted = append(of.counted, &held)
		m.untilExpired()
		m.slot = slot{} // it needs one of the policy that governs it now
	}
	g.members = append(g.members, m)
	return m
}

// consider finds out about a node all that a decision asks.
func (r *remembered) consider(w *World, selected, governed policy.Governed, in placing) {
	n, m := r.node, &r.member
	awaited, settled := in.ranking.Awaits(policyNode(n)), true
	var released bool
	if governed.By == nil && (w.Wiring.Reason != "" || retained(n.GPU.Spec)) {
		r.derived, released = nil, releases(n, selected.By)
		*m = staying(w, n, selected)
	} else {
		d := r.recall(w, governed)
		*m, settled, released = member{view: d.view, judgement: d.judgement, slot: d.slot, tally: d.tally}, d.settled, d.released
		if settled {
			m.settled = &d.state
		}
	}
	m.keepTaints(selected, awaited, in.tolerated)
	if !released {
		m.keepRelease(selected.By, in.groups)
	}
	m.allowAgent()
	m.rememberOthers(governed.By != nil)
	m.brief = m.inBrief()
	tainted := awaited != nil || selected.By != nil && len(taintsOf(selected.By)) > 0 // what NVIDIA's programs tolerate concerns all nodes
	m.still = settled && released && !tainted && m.isStill()
}

// isStill reports whether nothing is to be done about the node, and no time passes that counts.
func (m *member) isStill() bool {
	return len(m.actions) == 0 && m.after == 0 && !m.holds && !m.disturbed() && !m.hasNews()
}

// recall finds what was derived of a node the last time, and derives anew what no longer holds.
func (r *remembered) recall(w *World, g policy.Governed) *derived {
	n, d := r.node, r.derived
	b := basisOf(w, n, g.By)
	if d == nil || d.basis != b || !d.sameKeys(w, n) {
		timeless := *w
		timeless.Now = time.Time{}
		d = &derived{basis: b, view: look(&timeless, n, g)}
		d.tally = tally{demands: demandsOf(n.Pods), counts: countsOf(d.view), single: singleOf(d.view)}
		d.released = releases(n, g.By)
		d.selected, d.target = d.keys(w, n)
		r.derived = d
	}
	d.view.world, d.view.node, d.view.by, d.view.over = w, n, g.By, g.Over
	if !d.settled {
		d.judge()
	}
	return d
}

func (d *derived) judge() {
	m := &member{view: d.view, judgement: d.view.watch(d.view.judge())}
	m.slot = m.takes()
	m.reclaim()
	j := m.judgement
	d.judgement, d.slot = j, m.slot
	d.settled = j.State == StateUpToDate && len(j.actions)+len(j.start)+len(j.giveUp) == 0 && j.after == 0
	if d.settled {
		d.state = m.report()
	}
}

// keys is the content of the keys that the view of a node depends on.
func (d *derived) keys(w *World, n *Node) (selected, target string) {
	return w.Keys[n.Labels[v1alpha1.LabelConfig]], w.Keys[d.view.to.key]
}

func (d *derived) sameKeys(w *World, n *Node) bool {
	selected, target := d.keys(w, n)
	return selected == d.selected && target == d.target
}
