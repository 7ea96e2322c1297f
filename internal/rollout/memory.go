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
	nodes  map[string]*derived
	chosen map[string]*chosen // by node
	ranked string             // the signature of the policies by which they were chosen
	wiring Wiring             // of the last pass; with another one everything may differ, and it hardly ever changes
	queue  queue              // the pods that wait
	pass   int                // counts passes
}

// chosen are the policies that select a node, as positions in the ranking.
type chosen struct {
	version   int64 // of the node
	positions []int
	pass      int // in which it was used last
}

// govern finds the policies that select a node.
func (memory *Memory) govern(ranking policy.Ranking, n *Node) policy.Governed {
	c := memory.chosen[n.Name]
	if c == nil || n.Version == 0 || c.version != n.Version {
		c = &chosen{version: n.Version, positions: ranking.Selecting(policyNode(n))}
		memory.chosen[n.Name] = c
	}
	c.pass = memory.pass
	return ranking.Governed(c.positions)
}

// derived is what was derived of a node, and from what.
type derived struct {
	basis

	selected, target string // content of the key that the node selects, and of the one that it is to select
	view             *view
	judgement        judgement
	// settled says that the judgement stands until its basis changes: nothing is to be done, and no deadline passes.
	settled bool
	slot    slot
	state   NodeState // of a settled node
	// released is true if the GPUNode records how the policy releases the node.
	released bool
	member   member // of the last pass
	pass     int    // in which it was used last
}

// basis names all that the view of a node depends on, besides the wiring and the content of its keys. What is not in it a
// view must not read: the time, above all.
type basis struct {
	version    int64 // of the Node
	sighting         // of another controller that is not recorded on the Node
	policy     types.UID
	name       string // of the policy
	generation int64
}

func basisOf(w *World, n *Node, by *v1alpha1.GPUSharingPolicy) basis {
	b := basis{version: n.Version, sighting: w.Sightings.of(n)}
	if by != nil {
		b.policy, b.name, b.generation = by.UID, by.Name, by.Generation
	}
	return b
}

// recall finds what was derived of a node the last time, and derives anew what no longer holds.
func (memory *Memory) recall(w *World, n *Node, g policy.Governed) *derived {
	b, d := basisOf(w, n, g.By), memory.nodes[n.Name]
	if d == nil || n.Version == 0 || d.basis != b || !d.sameKeys(w, n) {
		timeless := *w
		timeless.Now = time.Time{}
		d = &derived{basis: b, view: look(&timeless, n, g)}
		d.view.demands = demandsOf(n.Pods)
		d.view.counts, d.view.single = countsOf(d.view), singleOf(d.view)
		d.released = releases(n, g.By)
		d.selected, d.target = d.keys(w, n)
		memory.nodes[n.Name] = d
	}
	d.pass = memory.pass
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

// begin begins a pass.
func (memory *Memory) begin(w Wiring) {
	memory.pass++
	if memory.nodes == nil || !reflect.DeepEqual(w, memory.wiring) {
		memory.nodes = map[string]*derived{}
	}
	memory.wiring = w
}

// rank forgets which policies select which nodes if the policies have changed.
func (memory *Memory) rank(ranking policy.Ranking) {
	if signature := ranking.Signature(); memory.chosen == nil || signature != memory.ranked {
		memory.chosen, memory.ranked = map[string]*chosen{}, signature
	}
}

// end forgets the nodes that the pass did not look at.
func (memory *Memory) end() {
	maps.DeleteFunc(memory.chosen, func(_ string, c *chosen) bool { return c.pass != memory.pass })
	maps.DeleteFunc(memory.nodes, func(_ string, d *derived) bool { return d.pass != memory.pass })
}
