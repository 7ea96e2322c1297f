// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rollout decides: from everything that is observed in the cluster, what to change next and what to report. It
// knows neither a client nor a clock. It is pure but for what it notes for later reconciles: the Memory, which changes
// no decision, and what Snapshot.Repeats and Snapshot.OtherControllers point to.
//
//	Snapshot ─→ toleranceOf ─→ for each node: node.Observe, node.Decide, node.AddFindings, keepTaints ─→ group
//	─→ configsOf, unmetWorkloads, paceGroup, computeStatus ─→ Decision
//
//	rollout → node → cluster → action → timing
package rollout

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// Decision is one safe step towards the desired state of all policies.
type Decision struct {
	// Actions are what is to be done now, in this order.
	Actions []action.Action
	// Policies is the status of each policy by name, complete and ready to be applied: conditions that did not change
	// keep their last transition time.
	Policies map[string]v1alpha1.GPUSharingPolicyStatus
	// Unmet tells of each policy the workloads of which no node meets the request once all policies are in force, a
	// line each.
	Unmet map[string][]string
	// Nodes are the states of all nodes that a policy governs or governed, by name.
	Nodes []NodeState
	// ConfigurePlugin says that the device plugin has to read our ConfigMap: a policy governs some node and is not
	// paused, or a node is not back at its baseline. Once the ClusterPolicy names our ConfigMap, a policy that governs
	// no node is enough. False: the ClusterPolicy may be restored.
	ConfigurePlugin bool
	// PluginConfigHeld is why devicePlugin.config of the ClusterPolicy must not change now, in either direction; empty
	// if it may.
	PluginConfigHeld string
	// KeepStrategy is true if a node that no policy changes has GPUs in MIG mode and no config of its own, so that the
	// default config must offer its instances as mig.strategy of the ClusterPolicy said.
	KeepStrategy bool
	// Tolerations are those that the operator must have in the ClusterPolicy: exactly these and no others.
	Tolerations []corev1.Toleration
	// ConfigureMIGManager says that NVIDIA's mig-manager has to read our ConfigMap: it partitions the GPUs of some
	// node, or is to go back to what it did there before.
	ConfigureMIGManager bool
	// After is when to decide again though nothing changes, because a deadline or the time of a sync passes; 0: never.
	After time.Duration
}

// Decide is one safe step towards the desired state of all policies. The same snapshot, with the same Repeats and
// OtherControllers, gives the same decision, and the snapshot that results from carrying it out gives the next one, so
// a reconcile may be cut short anywhere.
func Decide(s cluster.Snapshot) Decision { return new(Memory).Decide(s) }

// Decide is the function Decide, which does not do again what the memory has kept from the last reconcile.
func (memory *Memory) Decide(s cluster.Snapshot) Decision {
	beyond := limitPolicies(&s)
	groups := groupsOf(&s)
	ranking := policy.Rank(s.Policies)
	memory.begin(&s, ranking)
	defer memory.end(len(s.Nodes))
	s.Repeats.Begin(memory.ranked, s.Now)

	entries := memory.lookupAll(&s)
	memory.rank(&s, entries, ranking)
	tolerated := toleranceOf(&s)
	all := make([]*member, len(entries))
	for i, r := range entries {
		all[i] = memory.assign(&s, r, assignment{ranking: ranking, groups: groups, tolerated: tolerated})
	}
	memory.noteLost(groups)

	d := Decision{Policies: map[string]v1alpha1.GPUSharingPolicyStatus{}, Tolerations: tolerated.Ours, PluginConfigHeld: pluginConfigHeld(&s)}
	d.require(&s, all)
	configs := configsOf(&s, all, d.ConfigureMIGManager)
	s.FullConfigs = configs.full
	write, incomplete := configs.write(&s)
	if incomplete {
		s.ConfigsRefused = s.Repeats.Refusal(write)
	}
	d.Unmet = unmetWorkloads(&s, groups, all, memory.queue.Of(&s))
	unowned := slices.DeleteFunc(slices.Clone(groups[""].Unaffected), func(m *member) bool { return !m.MadeUnavailable() })
	for name, g := range groups {
		if name != "" {
			g.Counted = append(g.Counted, unowned...) // for whom they are taken is not known
		}
		pace(&s, g)
		if g.By != nil {
			d.Policies[g.By.Name] = computeStatus(g, &s, tolerated, d.Unmet[g.By.Name])
		}
	}
	for i := range beyond {
		d.Policies[beyond[i].Name] = computeStatus(&Group{By: &beyond[i], Beyond: len(s.Policies) + len(beyond)}, &s, tolerated, nil)
	}
	if incomplete && d.ConfigurePlugin {
		d.Actions, d.After = s.Repeats.Admit(d.Actions, write, s.Now, d.After)
	}
	d.configureDRA(&s, all)
	for _, m := range all {
		d.add(m, len(all))
	}
	return d
}

// groupsOf returns the group of each policy by name, as yet without nodes, and that of the nodes of which the policy is
// not known. It suspends the policies with windows that are invalid.
func groupsOf(s *cluster.Snapshot) map[string]*Group {
	policies, calendars, invalid := timing.Suspend(s.Policies)
	s.Policies = policies
	groups := map[string]*Group{"": {}}
	for i := range s.Policies {
		groups[s.Policies[i].Name] = &Group{By: &s.Policies[i], Windows: calendars[i], Invalid: invalid[i]}
	}
	return groups
}

// pace holds up the nodes of a group that must not change now.
func pace(s *cluster.Snapshot, g *Group) {
	paceGroup(g, s)
	for _, nodes := range [][]*member{g.Members, g.Leaving, g.Unaffected} {
		for _, m := range nodes {
			first, in, is := node.LooksFirst(m.View, m.Actions)
			most, taken := takenUntil(m)
			retained := node.Retained(m.Node.GPU.Spec) // what is retained is not looked at later
			if is && (retained || !slices.ContainsFunc(first, m.IsFought)) && (!taken || most.After(s.Now)) {
				m.Actions, m.CachedState, m.After = first, nil, timing.Sooner(m.After, in)
			}
			withholdRepeats(m, s)
		}
	}
}

// limitPolicies leaves out of the snapshot the policies that are too many, and returns them.
func limitPolicies(s *cluster.Snapshot) (beyond []v1alpha1.GPUSharingPolicy) {
	if len(s.Policies) <= policy.MostPolicies {
		return nil
	}
	governs := map[string]bool{}
	for i := range s.Nodes {
		governs[s.Nodes[i].GPU.Spec.PolicyName] = true
	}
	s.Policies, beyond = policy.Within(s.Policies, governs)
	return beyond
}

// require decides whether NVIDIA's device plugin and mig-manager have to read our ConfigMap.
func (d *Decision) require(s *cluster.Snapshot, all []*member) {
	d.ConfigurePlugin = slices.ContainsFunc(all, func(m *member) bool { return m.Summary.NeedsPlugin }) || pluginStaysConfigured(s)
	d.KeepStrategy = slices.ContainsFunc(all, func(m *member) bool { return m.Summary.ByDefault })
	d.ConfigureMIGManager = slices.ContainsFunc(all, func(m *member) bool { return m.Summary.NeedsMIGManager })
	if !d.ConfigurePlugin { // the executor takes the configs away
		s.Repeats.Undid(action.WriteConfigs{})
	}
}

// add adds what is done about a node, one of so many, and what is reported of it.
func (d *Decision) add(m *member, nodes int) {
	if !m.Unchanged {
		if report, news := reportAction(m); news {
			remaining := m.WithheldFor(report)
			if d.After = timing.Sooner(d.After, remaining); remaining == 0 {
				d.Actions = append(d.Actions, report)
			}
		}
	}
	for _, a := range m.Actions {
		d.Actions = append(d.Actions, m.Restamped(a))
	}
	d.After = timing.Sooner(d.After, m.After)
	if !m.HasStatus() {
		return
	}
	if d.Nodes == nil {
		d.Nodes = make([]NodeState, 0, nodes)
	}
	d.Nodes = append(d.Nodes, nodeStateOf(m))
}
