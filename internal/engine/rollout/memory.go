// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"encoding/binary"
	"maps"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Memory is what one reconcile leaves to the next, so that a node of which nothing has changed is not looked at again.
// It changes what a decision costs and never what is decided: what it keeps follows from values that are compared
// first. The zero value keeps nothing. It serves one reconcile at a time.
type Memory struct {
	nodes      map[string]*nodeEntry
	queue      podQueue // the pods that wait
	reconciles int      // counts reconciles

	// What concerns all nodes, as the last reconcile read it. round counts how often that was another than before.
	plugin cluster.DevicePlugin // with another one all nodes are forgotten: it hardly ever changes
	ranked string               // the signature of the policies
	keys   map[string]string
	round  int
	// selections are the nodes of that round by the policies that select them: of thousands of nodes, most have the same.
	selections map[string]*selection
}

// selection is the nodes that the same policies select.
type selection struct {
	positions []int // of the policies in the ranking
	governed  policy.Governed
	nodes     []string // that one of them governs, by name; of this reconcile
}

// nodeEntry is what memory keeps of a node, at one version of it.
type nodeEntry struct {
	node      *cluster.Node // of the last reconcile that read it
	reconcile int
	version   int64

	// What follows from the node alone.
	latest   time.Time // that is recorded on it
	bounded  bool      // it was looked at without times in the future
	shown    string    // the reason by which another controller shows on it; empty: none does
	mpsUsers []string  // the pods that hold GPUs, where NVIDIA's MPS DaemonSet runs

	// What follows from the node and from what concerns all nodes.
	stack     dra.Stack
	round     int // in which that was found out
	selection *selection
	derived   *derived // nil for a node that no policy governs and that stays as it is
	member    member   // of the last reconcile
}

// derived is what was derived of a node that a policy governs or governed, and from what.
type derived struct {
	basis

	content [3]string // of the keys
	view    *node.View
	tally   demandTally
	result  node.Result
	actions []action.Action // that wait for no slot
	// settled says that the result stays the same until its basis changes: nothing is to be done, and no deadline
	// passes.
	settled bool
	slot    Slot
	state   NodeState // of a settled node
	// released is true if the GPUNode records how the policy releases the node.
	released bool
}

// basis names all that the view of a node depends on, besides the Node, how the device plugin is installed and the
// content of its keys. What is not in it a view must not read: the time, above all.
type basis struct {
	cluster.OtherController        // of another controller that is not recorded on the Node
	dra                     string // what of the cluster matters where NVIDIA's DRA driver serves the node
	policy                  types.UID
	name                    string // of the policy
	generation              int64
}

func basisOf(s *cluster.Snapshot, n *cluster.Node, by *v1alpha1.GPUSharingPolicy, stack dra.Stack) basis {
	b := basis{OtherController: s.OtherControllers.Of(n)}
	if stack == dra.DRADriver {
		b.dra = s.DRA.Signature()
	}
	if by != nil {
		b.policy, b.name, b.generation = by.UID, by.Name, by.Generation
	}
	return b
}

// begin begins a reconcile.
func (memory *Memory) begin(s *cluster.Snapshot, ranking policy.Ranking) {
	memory.reconciles++
	if memory.nodes == nil || !reflect.DeepEqual(s.Plugin, memory.plugin) {
		memory.nodes, memory.selections, memory.plugin = map[string]*nodeEntry{}, map[string]*selection{}, s.Plugin
	}
	if signature := ranking.Signature(); signature != memory.ranked || !maps.Equal(s.Configs, memory.keys) {
		memory.ranked, memory.keys = signature, maps.Clone(s.Configs)
		memory.round++
		memory.selections = map[string]*selection{}
	}
	for _, same := range memory.selections {
		same.governed, same.nodes = ranking.Governed(same.positions), same.nodes[:0]
	}
}

// selectionOf is the selection of the policies at these positions of the ranking.
func (memory *Memory) selectionOf(ranking policy.Ranking, positions []int) *selection {
	key := make([]byte, 0, 2*len(positions))
	for _, p := range positions {
		key = binary.AppendUvarint(key, uint64(p))
	}
	same := memory.selections[string(key)]
	if same == nil {
		same = &selection{positions: positions, governed: ranking.Governed(positions)}
		memory.selections[string(key)] = same
	}
	return same
}

// rank finds which policies select each node, and how many shares they ask of NVIDIA's DRA driver, of which all its
// nodes have the same.
func (memory *Memory) rank(s *cluster.Snapshot, entries []*nodeEntry, ranking policy.Ranking) {
	s.DRA.RequestedShares = dra.RequestedShares{}
	for _, r := range entries {
		if r.round != memory.round {
			r.round, r.stack, r.member.Unchanged = memory.round, s.Plugin.StackOf(r.node), false
			r.selection = memory.selectionOf(ranking, ranking.Selecting(node.PolicyNode(r.node)))
		}
		if r.stack != dra.DRADriver {
			continue
		}
		if by := r.selection.governed.By; by != nil && dra.Shares(by.Spec.Sharing) != 0 {
			s.DRA.RequestedShares.Add(dra.Shares(by.Spec.Sharing), by.Name)
		}
	}
}

// lookup finds what is kept of a node. A node with times in the future is looked at without them, as long as they are.
func (memory *Memory) lookup(n *cluster.Node, now time.Time) *nodeEntry {
	r, limit := memory.nodes[n.Name], now.Add(timing.ClocksDiffer)
	if r == nil || n.Version == 0 || r.version != n.Version || r.bounded || r.latest.After(limit) {
		past, latest := n.WithoutFuture(limit)
		n, r = past, &nodeEntry{version: n.Version, round: -1, latest: latest, bounded: latest.After(limit)}
		r.shown, _ = cluster.ShownBy(n)
		if cluster.ServedByMPS(n.Pods) {
			r.mpsUsers = cluster.UsersOn(n)
		}
		memory.nodes[n.Name] = r
	}
	r.node, r.reconcile = n, memory.reconciles
	return r
}

// lookupAll finds what is kept of each node, by name, and notes the signs of other controllers.
func (memory *Memory) lookupAll(s *cluster.Snapshot) []*nodeEntry {
	nodes := make([]*cluster.Node, len(s.Nodes))
	for i := range s.Nodes {
		nodes[i] = &s.Nodes[i]
	}
	slices.SortFunc(nodes, func(a, b *cluster.Node) int { return cmp.Compare(a.Name, b.Name) })
	entries := make([]*nodeEntry, len(nodes))
	for i, n := range nodes {
		entries[i] = memory.lookup(n, s.Now)
		s.MpsUsers = append(s.MpsUsers, entries[i].mpsUsers...)
	}
	s.OtherControllers.Note(func(yield func(*cluster.Node, string) bool) {
		for _, r := range entries {
			if !yield(r.node, r.shown) {
				return
			}
		}
	}, s.Now)
	return entries
}

// end forgets the nodes that the reconcile, over so many, did not read.
func (memory *Memory) end(read int) {
	if len(memory.nodes) > read {
		maps.DeleteFunc(memory.nodes, func(_ string, r *nodeEntry) bool { return r.reconcile != memory.reconciles })
	}
}

// assignment is what nodes are assigned by, and to what.
type assignment struct {
	ranking   policy.Ranking
	groups    map[string]*Group
	tolerated tolerance
}

// group returns the group of a policy, which may be gone; that of the empty name has the nodes of which the policy is
// not known.
func (in assignment) group(name string) *Group {
	if in.groups[name] == nil {
		in.groups[name] = &Group{}
	}
	return in.groups[name]
}

// assign puts a node into the group that paces it, and computes of it what the last reconcile has not left.
func (memory *Memory) assign(s *cluster.Snapshot, r *nodeEntry, in assignment) *member {
	n, m := r.node, &r.member
	selected := r.selection.governed
	governed, unserved := selected, s.Plugin.Reason != "" && r.stack != dra.DRADriver
	if unserved {
		governed = policy.Governed{}
	}
	if m.Unchanged && s.OtherControllers.Of(n) == (cluster.OtherController{}) {
		m.Snapshot, m.Node, m.Policy, m.Losers = s, n, governed.By, governed.Over
	} else {
		r.consider(s, selected, governed, in)
	}
	if len(governed.Over) > 0 {
		r.selection.nodes = append(r.selection.nodes, n.Name)
	}
	if !unserved && governed.By == nil && policy.OptedOut(n.Labels, s.Plugin.Workload()) == nil {
		if p := in.ranking.Awaits(node.PolicyNode(n)); p != nil && p.Spec.GPUSelector != nil {
			in.groups[p.Name].Awaited = append(in.groups[p.Name].Awaited, n.Name)
		}
	}
	g := in.group(cluster.Owner(n, governed.By))
	switch {
	case r.derived == nil:
		g.Unaffected = append(g.Unaffected, m)
		return m
	case governed.By == nil:
		g.Leaving = append(g.Leaving, m)
		return m
	}
	if m.UnavailableForOther() {
		of, held := in.group(n.ChangedFor), *m
		of.Counted = append(of.Counted, &held)
		untilSlotExpires(m)
		m.Slot = Slot{} // it needs one of the policy that governs it now
	}
	g.Members = append(g.Members, m)
	return m
}

// noteLost tells the groups of the policies that select nodes which another one governs.
func (memory *Memory) noteLost(groups map[string]*Group) {
	for _, same := range memory.selections {
		for _, loser := range same.governed.Over {
			if len(same.nodes) > 0 {
				g := groups[loser.Name]
				g.Lost = append(g.Lost, lostNodes{To: same.governed.By.Name, Nodes: same.nodes})
			}
		}
	}
}

// consider finds out about a node all that a decision asks.
func (r *nodeEntry) consider(s *cluster.Snapshot, selected, governed policy.Governed, in assignment) {
	n, m := r.node, &r.member
	awaited, settled := in.ranking.Awaits(node.PolicyNode(n)), true
	unserved := s.Plugin.Reason != "" && r.stack != dra.DRADriver
	stays, released, is := ungoverned(s, n, selected, governed, unserved)
	if is {
		r.derived, *m = nil, stays
	} else {
		d := r.cachedView(s, governed)
		*m = member{View: d.view, Result: d.result, Actions: d.actions, Slot: d.slot, Demand: d.tally}
		settled, released = d.settled, d.released
		if settled {
			m.CachedState = &d.state
		}
	}
	keepTaints(m, selected, awaited, in.tolerated)
	if !released {
		recordRelease(m, selected.By, in.groups)
	}
	if m.View != nil {
		recordAdminClaims(m)
		recordMemoryOwner(m)
	}
	allowAgent(m)
	recordOthers(m, governed.By != nil)
	m.Summary = summaryOf(m)
	tainted := awaited != nil || selected.By != nil && len(taintsOf(selected.By)) > 0           // what NVIDIA's programs tolerate concerns all nodes
	m.Unchanged = settled && released && !tainted && r.stack != dra.DRADriver && isUnchanged(m) // what the driver offers concerns all its nodes
	if m.Unchanged && m.View != nil {
		m.View.Devices, m.View.Lines, m.View.Saved = nil, nil, nil // derived anew within microseconds, and most nodes are unchanged
	}
}

// isUnchanged reports whether nothing is to be done about the node, and no time passes that counts.
func isUnchanged(m *member) bool {
	return len(m.Actions) == 0 && m.After == 0 && !m.HoldsSlot && !m.MadeUnavailable() && !hasNews(m)
}

// cachedView finds what was derived of a node the last time, and derives anew what no longer holds.
func (r *nodeEntry) cachedView(s *cluster.Snapshot, g policy.Governed) *derived {
	n, d := r.node, r.derived
	b := basisOf(s, n, g.By, r.stack)
	if d == nil || d.basis != b || d.content != d.keys(s, n) {
		timeless := *s
		timeless.Now = time.Time{}
		d = &derived{basis: b, view: node.Observe(&timeless, n, g)}
		d.shareDevices(n.GPU.Spec.Devices)
		d.tally = demandTally{Demands: demandsOf(n.Pods), Counts: countsOf(d.view), Single: singleResources(d.view)}
		d.released = node.ReleaseRecorded(n, g.By)
		d.content = d.keys(s, n)
		r.derived = d
	}
	d.view.Snapshot, d.view.Node, d.view.Policy, d.view.Losers = s, n, g.By, g.Over
	if d.view.Devices == nil {
		d.view.Devices = plan.Devices(n.GPU.Status.Devices)
	}
	if !d.settled {
		d.decide()
	}
	return d
}

// shareDevices keeps the desired state of the GPUs once where it is the one that the GPUNode has.
func (d *derived) shareDevices(spec []v1alpha1.DeviceSpec) {
	if v := d.view; v.Desired != nil && len(v.Desired.Restored) == 0 && equality.Semantic.DeepEqual(v.Desired.Devices, spec) {
		if equality.Semantic.DeepEqual(v.Target.Devices, spec) {
			v.Target.Devices = spec
		}
		v.Desired.Devices = spec
	}
}

func (d *derived) decide() {
	m := &member{View: d.view}
	m.Result, m.Actions = node.AddFindings(d.view, node.Decide(d.view))
	awaitFormer(m)
	m.Slot = slotOf(m)
	reclaimSlot(m)
	d.result, d.actions, d.slot = m.Result, slices.Clip(m.Actions), m.Slot
	d.settled = m.State == node.UpToDate && len(m.Actions) == 0 && m.Next == nil && m.After == 0
	if d.settled {
		d.state = nodeStateOf(m)
	}
}

// keys is the content of the keys that the view of a node depends on: the one that the node selects, the one that it is to
// select and, where that is what it falls back to, the one of its last good state.
func (d *derived) keys(s *cluster.Snapshot, n *cluster.Node) (content [3]string) {
	content[0], content[1] = s.Configs[n.Labels[v1alpha1.LabelConfig]], s.Configs[d.view.Target.Config]
	if good := n.GPU.Status.Rollout.LastGood; good != nil && d.view.FallsBack {
		content[2], _ = configContent(s, good.ConfigName)
	}
	return content
}
