// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rollout decides: from everything that is so in the cluster, what to change next and what to say about it.
// It is pure; it knows neither a client nor a clock.
//
// The state of a node is derived in each pass and never stored:
//
//	Undiscovered ─ Impossible                                              nothing is done
//	StaleGentle ───────────────────────────────────┐
//	StaleDisruptive → Draining → Quiescing → Quiet ┴→ Applying → Selecting → Verifying → Releasing → UpToDate
//	                     │                             └────→ Failed ←───────────┘
//	                     └ in time not idle: Failed            └ back to the last good state, or the baseline
//
// A node that has begun holds its slot in the budget until it is UpToDate, Failed and rolled back, or past its deadline
// (slots.go), and nodes are taken in a fixed order, so that a pass over an older world picks the same nodes again. A node
// that was UpToDate and advertises something else is Degraded: it is reported, and keeps no other node waiting.
package rollout

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// Decide is one safe pass towards what the policies ask. The same world gives the same decision, and the world that
// results from carrying it out gives the next one, so a pass may be cut short anywhere.
func Decide(w World) Decision { return new(Memory).Decide(w) }

// Decide is the function Decide, which does not do again what the memory has kept from the last pass.
func (memory *Memory) Decide(w World) Decision {
	policies, windows, invalid := suspend(w.Policies)
	w.Policies = policies
	ranking := policy.Rank(w.Policies)
	memory.begin(&w, ranking)
	defer memory.end(len(w.Nodes))
	w.Repeats.begin(memory.ranked, w.Now)
	groups := map[string]*group{}
	for i := range w.Policies {
		groups[w.Policies[i].Name] = &group{by: &w.Policies[i], windows: windows[i], invalid: invalid[i]}
	}
	groups[""] = &group{}
	nodes := make([]*Node, len(w.Nodes))
	for i := range w.Nodes {
		nodes[i] = &w.Nodes[i]
	}
	slices.SortFunc(nodes, func(a, b *Node) int { return cmp.Compare(a.Name, b.Name) })
	met := make([]*remembered, len(nodes))
	for i, n := range nodes {
		met[i] = memory.meet(n)
		w.mpsUsers = append(w.mpsUsers, met[i].mpsUsers...)
	}
	w.Sightings.note(func(yield func(*Node, string) bool) {
		for _, r := range met {
			if !yield(r.node, r.shown) {
				return
			}
		}
	}, w.Now)
	tolerated := tolerate(&w)
	all := make([]*member, len(met))
	for i, r := range met {
		all[i] = memory.place(&w, r, placing{ranking: ranking, groups: groups, tolerated: tolerated})
	}
	return decide(&w, groups, all, tolerated, memory.queue.of(&w))
}

// placing is what nodes are placed by, and where.
type placing struct {
	ranking   policy.Ranking
	groups    map[string]*group
	tolerated tolerance
}

// group returns the group of a policy, which may be gone; that of the empty name has the nodes of which the policy is not known.
func (in placing) group(name string) *group {
	if in.groups[name] == nil {
		in.groups[name] = &group{}
	}
	return in.groups[name]
}

// staying is a node that no policy governs, or can, and that stays as it is.
func staying(w *World, n *Node, selected policy.Governed) member {
	m := member{view: &view{world: w, node: n}}
	m.judgement = judgement{State: StateUpToDate, reason: v1alpha1.ReasonReady, actions: m.retain()}
	if selected.By == nil && !retained(n.GPU.Spec) { // no status of a policy reports why it is not restored
		m.State, m.reason, m.message = StateImpossible, w.Wiring.Reason, w.Wiring.Message
	}
	m.unserved = selected.By != nil && w.Wiring.Reason != ""
	m.slot = m.takes()
	return m
}

// retained says whether a node that no policy governs stays as it is: nothing was ever done to it, or its last policy
// says so.
func retained(spec v1alpha1.GPUNodeSpec) bool {
	return spec.Baseline == nil || spec.Release != nil && spec.Release.ReleasePolicy == v1alpha1.ReleasePolicyRetain
}

// retain leaves a node as it is, without holding it.
func (m *member) retain() []Action {
	actions := m.letGo("no policy governs the node")
	if m.node.GPU.Spec.Baseline == nil && m.overridden() {
		actions = append(actions, m.allowMPS(true)...)
	}
	if spec := m.node.GPU.Spec; m.world.Wiring.Reason == "" && spec.PolicyName != "" {
		spec = *spec.DeepCopy()
		spec.PolicyName, spec.Strategy = "", ""
		if spec.Baseline == nil {
			spec = v1alpha1.GPUNodeSpec{}
		}
		return append(actions, SetSpec{Node: m.node.Name, Spec: spec, Why: "leaving the node as it is"})
	}
	if m.world.Wiring.Reason == "" {
		actions = append(actions, m.keepBaseline()...)
	}
	return actions
}

// decide decides on all nodes, which come by name.
func decide(w *World, groups map[string]*group, all []*member, tolerated tolerance, waiting []waiting) Decision {
	d := Decision{Policies: map[string]v1alpha1.GPUSharingPolicyStatus{}, Tolerations: tolerated.ours, Held: w.held()}
	d.Unmet = impactOf(w, groups, all, waiting)
	for name, g := range groups {
		if name != "" {
			g.counted = append(g.counted, groups[""].idle...)
		}
		g.pace(w)
		for _, nodes := range [][]*member{g.members, g.leaving, g.idle} {
			for _, m := range nodes {
				m.withhold(w)
			}
		}
		if g.by != nil {
			d.Policies[g.by.Name] = g.status(w, tolerated, d.Unmet[g.by.Name])
		}
	}
	d.Wire = slices.ContainsFunc(all, func(m *member) bool { return m.brief.wired }) || w.staysWired()
	d.KeepStrategy = slices.ContainsFunc(all, func(m *member) bool { return m.brief.byDefault })
	d.WireMIG = slices.ContainsFunc(all, func(m *member) bool { return m.brief.wiredMIG })
	if write, needed := keys(w, all, d.WireMIG); needed && d.Wire {
		d.Actions, d.After = w.Repeats.admit(d.Actions, write, w.Now, d.After)
	}
	for _, m := range all {
		if !m.still {
			if report, news := m.reports(); news {
				d.Actions, d.After = w.Repeats.admit(d.Actions, report, w.Now, d.After)
			}
		}
		d.Actions = append(d.Actions, m.actions...)
		d.After = Sooner(d.After, m.after)
		if m.listed() {
			if d.Nodes == nil {
				d.Nodes = make([]NodeState, 0, len(all))
			}
			d.Nodes = append(d.Nodes, m.report())
		}
	}
	return d
}

// Sooner is the earlier of two times to look again; 0 is never, and so is less.
func Sooner(a, b time.Duration) time.Duration {
	if a <= 0 || b > 0 && b < a {
		return max(b, 0)
	}
	return a
}

// brief is what a decision asks of each of all nodes. Of a node that stands it is found out once.
type brief struct {
	wired, byDefault, wiredMIG bool
	// configs are those that the Node and its GPUNode name: selected, asked for, and of the last good state. Empty: none.
	configs [3]string
	offer   offer
}

func (m *member) inBrief() brief {
	spec := &m.node.GPU.Spec
	b := brief{wired: m.wired(), byDefault: m.byDefault(), wiredMIG: m.usesConfigs() && !m.onPaper(), offer: m.offers()}
	b.configs = [...]string{m.node.Labels[v1alpha1.LabelConfig], spec.ConfigName, ""}
	if good := m.node.GPU.Status.Rollout.LastGood; good != nil {
		b.configs[2] = good.ConfigName
	}
	return b
}

// wired says whether the device plugin of the node has to read our ConfigMap: a policy governs it, or did. One that is
// paused from the start changes nothing, and pointing the plugin at us restarts it on every node.
func (m *member) wired() bool {
	return m.by != nil && !m.by.Spec.Rollout.Paused || m.node.GPU.Spec.Baseline != nil
}

// staysWired reports whether the ClusterPolicy keeps naming our ConfigMap though no node needs that now: a policy may govern the
// next one. To change the ClusterPolicy restarts NVIDIA's programs on every node, and a pool of nodes may scale to zero often.
func (w *World) staysWired() bool {
	return w.Wiring.ClusterPolicy && w.Wiring.Ready && slices.ContainsFunc(w.Policies, func(p v1alpha1.GPUSharingPolicy) bool {
		return p.DeletionTimestamp.IsZero() && !p.Spec.Rollout.Paused
	})
}

// byDefault reports whether the node gets the default config and has instances.
func (m *member) byDefault() bool {
	_, labelled := m.node.Labels[v1alpha1.LabelConfig]
	return (m.by == nil || m.onPaper()) && m.node.GPU.Spec.Baseline == nil && !labelled &&
		slices.ContainsFunc(m.node.GPU.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled })
}

// onPaper says whether the policy changes nothing as yet.
func (m *member) onPaper() bool { return m.by != nil && m.by.Spec.Rollout.Paused }

// listed says whether there is anything to say about the node.
func (m *member) listed() bool { return m.by != nil || m.node.GPU.Spec.Baseline != nil }

func (m *member) report() NodeState {
	if m.settled != nil {
		return *m.settled
	}
	s := NodeState{
		Node: m.node.Name, State: m.State, Reason: m.reason, Message: m.message, Plan: m.planned(),
		InTheWay: m.users(), Key: m.to.key, Advertised: offered(m.node), Devices: m.to.devices,
		Retained: m.by == nil && retained(m.node.GPU.Spec),
	}
	if m.by != nil {
		s.Policy = m.by.Name
	}
	if m.wish != nil {
		s.Expected, s.Replicas = m.wish.Config.Resources, m.wish.Config.Replicas
	}
	return s
}

// planned lists the steps of the plan. Nobody may change the list.
func (v *view) planned() []string {
	if v.lines == nil {
		v.lines = new(v.describe())
	}
	return *v.lines
}

func (v *view) describe() []string {
	const most, length = 64, 256 // of the schema
	var steps []string
	if v.partitions() {
		steps = append(steps, cut(v.clearing(), length))
	}
	if v.excludesNVIDIA() && !v.overridden() && v.byNodeFeature() {
		steps = append(steps, "keep NVIDIA's MPS DaemonSet off the node by NodeFeature "+OverrideName(v.node.Name))
	}
	for _, s := range v.steps {
		if len(steps) < most && (!v.managed() || !plan.ChangesMIG(s)) {
			steps = append(steps, cut(s.String(), length))
		}
	}
	if v.reboots() && len(steps) < most {
		steps = append(steps, "reboot the node")
	}
	return steps
}
