// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/budget"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/change"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/conflicts"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/group"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/repair"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/status"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/taints"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/workloads"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Memory is what one pass leaves to the next, so that a node of which nothing has changed is not looked at again. It
// changes what a decision costs and never what is decided: what it keeps follows from values that are compared first. The
// zero value remembers nothing. It serves one pass at a time.
type Memory struct {
	nodes map[string]*remembered
	queue workloads.Queue // the pods that wait
	pass  int             // counts passes

	// What concerns all nodes, as the last pass met it. round counts how often that was another than before.
	wiring world.DevicePlugin // with another one all nodes are forgotten: it hardly ever changes
	ranked string             // the signature of the policies
	keys   map[string]string
	round  int
}

// remembered is what memory keeps of a node, at one version of it.
type remembered struct {
	node    *world.Node // of the last pass that met it
	pass    int
	version int64

	// What follows from the node alone.
	shown    string   // the reason by which another controller shows on it; empty: none does
	mpsUsers []string // the pods that hold GPUs, where NVIDIA's MPS DaemonSet runs

	// What follows from the node and from what concerns all nodes.
	stack     dra.Stack
	round     int          // in which that was found out
	positions []int        // of the policies that select the node, in the ranking
	derived   *derived     // nil for a node that no policy governs and that stays as it is
	member    group.Member // of the last pass
}

// derived is what was derived of a node that a policy governs or governed, and from what.
type derived struct {
	basis

	selected, target string // content of the key that the node selects, and of the one that it is to select
	view             *view.View
	tally            group.Tally
	judgement        gate.Judgement
	actions          []action.Action // that wait for no slot
	// settled says that the judgement stands until its basis changes: nothing is to be done, and no deadline passes.
	settled bool
	slot    group.Slot
	state   group.NodeState // of a settled node
	// released is true if the GPUNode records how the policy releases the node.
	released bool
}

// basis names all that the view of a node depends on, besides the Node, the wiring and the content of its keys. What is not in it
// a view must not read: the time, above all.
type basis struct {
	world.Sighting        // of another controller that is not recorded on the Node
	dra            string // what of the cluster matters where NVIDIA's DRA driver serves the node
	policy         types.UID
	name           string // of the policy
	generation     int64
}

func basisOf(w *world.World, n *world.Node, by *v1alpha1.GPUSharingPolicy, stack dra.Stack) basis {
	b := basis{Sighting: w.Sightings.Of(n)}
	if stack == dra.Driver {
		b.dra = w.DRA.Signature()
	}
	if by != nil {
		b.policy, b.name, b.generation = by.UID, by.Name, by.Generation
	}
	return b
}

// begin begins a pass.
func (memory *Memory) begin(w *world.World, ranking policy.Ranking) {
	memory.pass++
	if memory.nodes == nil || !reflect.DeepEqual(w.Plugin, memory.wiring) {
		memory.nodes, memory.wiring = map[string]*remembered{}, w.Plugin
	}
	if signature := ranking.Signature(); signature != memory.ranked || !maps.Equal(w.Configs, memory.keys) {
		memory.ranked, memory.keys = signature, maps.Clone(w.Configs)
		memory.round++
	}
}

// rank finds which policies select each node, and how many shares they ask of NVIDIA's DRA driver, of which all its nodes have the same.
func (memory *Memory) rank(w *world.World, met []*remembered, ranking policy.Ranking) {
	w.DRA.Asked = dra.Asked{}
	for _, r := range met {
		if r.round != memory.round {
			r.round, r.positions, r.stack, r.member.Still = memory.round, ranking.Selecting(view.PolicyNode(r.node)), w.StackOf(r.node), false
		}
		if r.stack != dra.Driver {
			continue
		}
		if by := ranking.Governed(r.positions).By; by != nil && dra.Shares(by.Spec.Sharing) != 0 {
			w.DRA.Asked.Add(dra.Shares(by.Spec.Sharing), by.Name)
		}
	}
}

// meet finds what is remembered of a node.
func (memory *Memory) meet(n *world.Node) *remembered {
	r := memory.nodes[n.Name]
	if r == nil || n.Version == 0 || r.version != n.Version {
		r = &remembered{version: n.Version, round: -1}
		r.shown, _ = world.ShownBy(n)
		if world.ServedByMPS(n.Pods) {
			r.mpsUsers = world.UsersOn(n)
		}
		memory.nodes[n.Name] = r
	}
	r.node, r.pass = n, memory.pass
	return r
}

// meetAll finds what is remembered of each node, by name, and notes the signs of other controllers.
func (memory *Memory) meetAll(w *world.World) []*remembered {
	nodes := make([]*world.Node, len(w.Nodes))
	for i := range w.Nodes {
		nodes[i] = &w.Nodes[i]
	}
	slices.SortFunc(nodes, func(a, b *world.Node) int { return cmp.Compare(a.Name, b.Name) })
	met := make([]*remembered, len(nodes))
	for i, n := range nodes {
		met[i] = memory.meet(n)
		w.MpsUsers = append(w.MpsUsers, met[i].mpsUsers...)
	}
	w.Sightings.Note(func(yield func(*world.Node, string) bool) {
		for _, r := range met {
			if !yield(r.node, r.shown) {
				return
			}
		}
	}, w.Now)
	return met
}

// end forgets the nodes that the pass, over so many, did not meet.
func (memory *Memory) end(met int) {
	if len(memory.nodes) > met {
		maps.DeleteFunc(memory.nodes, func(_ string, r *remembered) bool { return r.pass != memory.pass })
	}
}

// placing is what nodes are placed by, and where.
type placing struct {
	ranking   policy.Ranking
	groups    map[string]*group.Group
	tolerated taints.Tolerance
}

// group returns the group of a policy, which may be gone; that of the empty name has the nodes of which the policy is not known.
func (in placing) group(name string) *group.Group {
	if in.groups[name] == nil {
		in.groups[name] = &group.Group{}
	}
	return in.groups[name]
}

// place puts a node into the group that paces it, and finds out about it what does not stand from the last pass.
func (memory *Memory) place(w *world.World, r *remembered, in placing) *group.Member {
	n, m := r.node, &r.member
	selected := in.ranking.Governed(r.positions)
	governed, unserved := selected, w.Plugin.Reason != "" && r.stack != dra.Driver
	if unserved {
		governed = policy.Governed{}
	}
	if m.Still && w.Sightings.Of(n) == (world.Sighting{}) {
		m.World, m.Node, m.Policy, m.Losers = w, n, governed.By, governed.Over
	} else {
		r.consider(w, selected, governed, in)
	}
	for _, loser := range governed.Over {
		in.groups[loser.Name].Lost = append(in.groups[loser.Name].Lost, group.Lost{Node: n.Name, To: governed.By.Name})
	}
	if !unserved && governed.By == nil && !policy.OptedOut(n.Labels) {
		if p := in.ranking.Awaits(view.PolicyNode(n)); p != nil && p.Spec.GPUSelector != nil {
			in.groups[p.Name].Awaited = append(in.groups[p.Name].Awaited, n.Name)
		}
	}
	g := in.group(world.Owner(n, governed.By))
	switch {
	case r.derived == nil:
		g.Idle = append(g.Idle, m)
		return m
	case governed.By == nil:
		g.Leaving = append(g.Leaving, m)
		return m
	}
	if m.HeldByOther() {
		of, held := in.group(n.ChangedFor), *m
		of.Counted = append(of.Counted, &held)
		budget.UntilExpired(m)
		m.Slot = group.Slot{} // it needs one of the policy that governs it now
	}
	g.Members = append(g.Members, m)
	return m
}

// consider finds out about a node all that a decision asks.
func (r *remembered) consider(w *world.World, selected, governed policy.Governed, in placing) {
	n, m := r.node, &r.member
	awaited, settled := in.ranking.Awaits(view.PolicyNode(n)), true
	unserved := w.Plugin.Reason != "" && r.stack != dra.Driver
	stays, released, is := ungoverned(w, n, selected, governed, unserved)
	if is {
		r.derived, *m = nil, stays
	} else {
		d := r.recall(w, governed)
		*m = group.Member{View: d.view, Judgement: d.judgement, Actions: d.actions, Slot: d.slot, Tally: d.tally}
		settled, released = d.settled, d.released
		if settled {
			m.Settled = &d.state
		}
	}
	taints.Keep(m, selected, awaited, in.tolerated)
	if !released {
		keepRelease(m, selected.By, in.groups)
	}
	if m.View != nil {
		keepAdminClaims(m)
	}
	allowAgent(m)
	conflicts.Record(m, governed.By != nil)
	m.Brief = inBrief(m)
	tainted := awaited != nil || selected.By != nil && len(taints.Of(selected.By)) > 0 // what NVIDIA's programs tolerate concerns all nodes
	m.Still = settled && released && !tainted && r.stack != dra.Driver && isStill(m)   // what the driver offers concerns all its nodes
}

// isStill reports whether nothing is to be done about the node, and no time passes that counts.
func isStill(m *group.Member) bool {
	return len(m.Actions) == 0 && m.After == 0 && !m.Holds && !m.Disturbed() && !status.HasNews(m)
}

// recall finds what was derived of a node the last time, and derives anew what no longer holds.
func (r *remembered) recall(w *world.World, g policy.Governed) *derived {
	n, d := r.node, r.derived
	b := basisOf(w, n, g.By, r.stack)
	if d == nil || d.basis != b || !d.sameKeys(w, n) {
		timeless := *w
		timeless.Now = time.Time{}
		d = &derived{basis: b, view: change.Observe(&timeless, n, g)}
		d.tally = group.Tally{Demands: workloads.DemandsOf(n.Pods), Counts: status.CountsOf(d.view), Single: workloads.SingleOf(d.view)}
		d.released = view.Releases(n, g.By)
		d.selected, d.target = d.keys(w, n)
		r.derived = d
	}
	d.view.World, d.view.Node, d.view.Policy, d.view.Losers = w, n, g.By, g.Over
	if !d.settled {
		d.decide()
	}
	return d
}

func (d *derived) decide() {
	m := &group.Member{View: d.view}
	m.Judgement, m.Actions = repair.Add(d.view, change.Next(d.view))
	m.Slot = budget.SlotOf(m)
	budget.Reclaim(m)
	d.judgement, d.actions, d.slot = m.Judgement, slices.Clip(m.Actions), m.Slot
	d.settled = m.State == state.UpToDate && len(m.Actions) == 0 && m.Next == nil && m.After == 0
	if d.settled {
		d.state = status.Report(m)
	}
}

// keys is the content of the keys that the view of a node depends on.
func (d *derived) keys(w *world.World, n *world.Node) (selected, target string) {
	return w.Configs[n.Labels[v1alpha1.LabelConfig]], w.Configs[d.view.Target.Config]
}

func (d *derived) sameKeys(w *world.World, n *world.Node) bool {
	selected, target := d.keys(w, n)
	return selected == d.selected && target == d.target
}
