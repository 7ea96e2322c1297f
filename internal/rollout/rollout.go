// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rollout decides: from everything that is observed in the cluster, what to change next and what to report. It is pure; it
// knows neither a client nor a clock.
//
//	world ─→ taints.Tolerate ─→ for each node: change.Observe, change.Next, repair.Add, taints.Keep ─→ group
//	─→ workloads.Unmet, budget.Pace, status.Of, writeConfigs ─→ Decision
//
// Each package below has one subject, and imports only what is to its right or below:
//
//	rollout: status: taints → budget, workloads → change, repair
//	change, repair → plugin, nvidiamig, nvidiamps, maintenance, conflicts, eviction → gate
//	gate: clients, desired → baseline → view → world → action → state, timing
package rollout

import (
	"cmp"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/budget"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/group"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/nvidiamig"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/nvidiamps"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/status"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/taints"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/windows"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/workloads"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
)

// Decide is one safe pass towards what the policies ask. The same world gives the same decision, and the world that
// results from carrying it out gives the next one, so a pass may be cut short anywhere.
func Decide(w world.World) Decision { return new(Memory).Decide(w) }

// Decide is the function Decide, which does not do again what the memory has kept from the last pass.
func (memory *Memory) Decide(w world.World) Decision {
	policies, windows, invalid := windows.Suspend(w.Policies)
	w.Policies = policies
	ranking := policy.Rank(w.Policies)
	memory.begin(&w, ranking)
	defer memory.end(len(w.Nodes))
	w.Repeats.Begin(memory.ranked, w.Now)
	groups := map[string]*group.Group{}
	for i := range w.Policies {
		groups[w.Policies[i].Name] = &group.Group{By: &w.Policies[i], Windows: windows[i], Invalid: invalid[i]}
	}
	groups[""] = &group.Group{}
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
	tolerated := taints.Tolerate(&w)
	all := make([]*group.Member, len(met))
	for i, r := range met {
		all[i] = memory.place(&w, r, placing{ranking: ranking, groups: groups, tolerated: tolerated})
	}
	return decide(&w, groups, all, tolerated, memory.queue.Of(&w))
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

// staying is a node that no policy governs, or can, and that stays as it is.
func staying(w *world.World, n *world.Node, selected policy.Governed) group.Member {
	m := group.Member{View: &view.View{World: w, Node: n}}
	m.Judgement = gate.Judgement{State: state.UpToDate, Reason: v1alpha1.ReasonReady, Actions: retain(&m)}
	if selected.By == nil && !view.Retained(n.GPU.Spec) { // no status of a policy reports why it is not restored
		m.State, m.Reason, m.Message = state.Unsupported, w.Plugin.Reason, w.Plugin.Message
	}
	m.Unserved = selected.By != nil && w.Plugin.Reason != ""
	m.Slot = budget.SlotOf(&m)
	return m
}

// retain leaves a node as it is, without holding it.
func retain(m *group.Member) []action.Action {
	actions := gate.LetGo(m.View, "no policy governs the node")
	if m.Node.GPU.Spec.Baseline == nil && view.Overridden(m.View) {
		actions = append(actions, nvidiamps.Allow(m.View, true)...)
	}
	if spec := m.Node.GPU.Spec; m.World.Plugin.Reason == "" && spec.PolicyName != "" {
		spec = *spec.DeepCopy()
		spec.PolicyName, spec.Strategy = "", ""
		if spec.Baseline == nil {
			spec = v1alpha1.GPUNodeSpec{}
		}
		return append(actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Why: "leaving the node as it is"})
	}
	if m.World.Plugin.Reason == "" {
		actions = append(actions, keepBaseline(m)...)
	}
	return actions
}

// decide decides on all nodes, which come by name.
func decide(w *world.World, groups map[string]*group.Group, all []*group.Member, tolerated taints.Tolerance, waiting []workloads.Waiting) Decision {
	d := Decision{Policies: map[string]v1alpha1.GPUSharingPolicyStatus{}, Tolerations: tolerated.Ours, Held: taints.PluginConfigHeld(w)}
	d.Unmet = workloads.Unmet(w, groups, all, waiting)
	for name, g := range groups {
		if name != "" {
			g.Counted = append(g.Counted, groups[""].Idle...)
		}
		budget.Pace(g, w)
		for _, nodes := range [][]*group.Member{g.Members, g.Leaving, g.Idle} {
			for _, m := range nodes {
				budget.Withhold(m, w)
			}
		}
		if g.By != nil {
			d.Policies[g.By.Name] = status.Of(g, w, tolerated, d.Unmet[g.By.Name])
		}
	}
	d.ConfigurePlugin = slices.ContainsFunc(all, func(m *group.Member) bool { return m.Brief.NeedsPlugin }) || pluginStaysConfigured(w)
	d.KeepStrategy = slices.ContainsFunc(all, func(m *group.Member) bool { return m.Brief.ByDefault })
	d.ConfigureMIGManager = slices.ContainsFunc(all, func(m *group.Member) bool { return m.Brief.NeedsMIGManager })
	if write, needed := writeConfigs(w, all, d.ConfigureMIGManager); needed && d.ConfigurePlugin {
		d.Actions, d.After = w.Repeats.Admit(d.Actions, write, w.Now, d.After)
	}
	for _, m := range all {
		if !m.Still {
			if report, news := status.Reports(m); news {
				d.Actions, d.After = w.Repeats.Admit(d.Actions, report, w.Now, d.After)
			}
		}
		d.Actions = append(d.Actions, m.Actions...)
		d.After = timing.Sooner(d.After, m.After)
		if m.Listed() {
			if d.Nodes == nil {
				d.Nodes = make([]group.NodeState, 0, len(all))
			}
			d.Nodes = append(d.Nodes, status.Report(m))
		}
	}
	return d
}

func inBrief(m *group.Member) group.Brief {
	spec := &m.Node.GPU.Spec
	b := group.Brief{NeedsPlugin: needsPlugin(m), ByDefault: byDefault(m), NeedsMIGManager: nvidiamig.UsesConfigs(m.View) && !m.OnPaper(), Offer: workloads.OfferOf(m)}
	b.Configs = [...]string{m.Node.Labels[v1alpha1.LabelConfig], spec.ConfigName, ""}
	if good := m.Node.GPU.Status.Rollout.LastGood; good != nil {
		b.Configs[2] = good.ConfigName
	}
	return b
}

// needsPlugin says whether the device plugin of the node has to read our ConfigMap: a policy governs it, or did. One that is
// paused from the start changes nothing, and pointing the plugin at us restarts it on every node.
func needsPlugin(m *group.Member) bool {
	return m.Policy != nil && !m.Policy.Spec.Rollout.Paused || m.Node.GPU.Spec.Baseline != nil
}

// pluginStaysConfigured reports whether the ClusterPolicy keeps naming our ConfigMap though no node needs that now: a policy may govern the
// next one. To change the ClusterPolicy restarts NVIDIA's programs on every node, and a pool of nodes may scale to zero often.
func pluginStaysConfigured(w *world.World) bool {
	return w.Plugin.ClusterPolicy && w.Plugin.Ready && slices.ContainsFunc(w.Policies, func(p v1alpha1.GPUSharingPolicy) bool {
		return p.DeletionTimestamp.IsZero() && !p.Spec.Rollout.Paused
	})
}

// ByDefault reports whether the node gets the default config and has instances.
func byDefault(m *group.Member) bool {
	_, labelled := m.Node.Labels[v1alpha1.LabelConfig]
	return (m.Policy == nil || m.OnPaper()) && m.Node.GPU.Spec.Baseline == nil && !labelled &&
		slices.ContainsFunc(m.Node.GPU.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled })
}

// keepBaseline writes again what either object has lost of the baseline of a node that stays as it is.
func keepBaseline(m *group.Member) []action.Action {
	spec := m.Node.GPU.Spec
	if spec.Baseline == nil {
		return nil
	}
	var actions []action.Action
	if _, has := m.Node.Annotations[v1alpha1.AnnotationBaseline]; !has {
		patch := m.Patch("recording the baseline")
		patch.Annotations[v1alpha1.AnnotationBaseline] = new(world.CopyOf(spec))
		actions = append(actions, patch)
	}
	if m.Node.BaselineLost {
		actions = append(actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Why: "recording the baseline"})
	}
	return actions
}
