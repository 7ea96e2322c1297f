// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The budget decides which nodes may change at the same time.
//
//	result with a paced act → blocked by pause, window, halt? → slot free (maxUnavailable, one node first)? → actions | wait
//
// A node that has begun holds its slot until it is up to date, failed and rolled back, or past its deadline (slots.go).
// Nodes are taken in a fixed order, so that a decision over an older snapshot picks the same nodes again.

// paceGroup turns what each node would do next into what it may do now.
func paceGroup(g *Group, s *cluster.Snapshot) {
	g.count()
	g.Halted = g.By != nil && g.Failures >= int(max(g.By.Spec.Rollout.FailureThreshold, 1))
	b := newBudget(g)
	for _, m := range changeOrder(g) {
		endLostTurn(g, s, m)
		paced, needsSlot := m.Next.(node.PacedAct)
		if !needsSlot {
			continue
		}
		reason, message := deferredBy(g, s, m)
		if reason == "" {
			reason, message = unrecorded(s, m, paced)
		}
		if withheld := func(a action.Action) bool { return m.WithheldFor(a) > 0 }; reason == "" && !m.HoldsSlot && slices.ContainsFunc(paced.Start, withheld) {
			m.Actions = append(m.Actions, paced.Start...) // withholdRepeats leaves them out, so the node takes no slot
			continue
		}
		if reason == "" {
			reason, message = b.admit(m, paced)
		}
		if reason != "" {
			if reason == v1alpha1.ReasonWaitingForFirst {
				m.FirstSince = b.since
			}
			deferAct(m, reason, message)
			continue
		}
		m.Actions = append(m.Actions, paced.Start...)
	}
}

// count counts what a policy changes, and which of that failed, without what follows demand for MIG instances.
func (g *Group) count() {
	for _, m := range g.Members {
		if m.ForDemand {
			continue
		}
		if m.State == node.Failed && m.Reason != v1alpha1.ReasonDrainTimedOut { // its users keep it, and nothing was tried
			g.Failures++
		}
		_, paced := node.SplitAct(m.Next)
		g.Changes = g.Changes || m.HoldsSlot || len(paced.Start) > 0
	}
}

// budget is what is left of the slots for nodes that change at the same time.
type budget struct {
	slots, remaining int
	proven           map[string]bool // configurations that some node of the group has reached
	others           int             // nodes that the policy is changing, without those that failed
	unavailable      int             // nodes that are kept from their users
	alone            bool            // one of them goes first with a new configuration
	since            time.Time       // when one of them came to its last stage
}

func newBudget(g *Group) *budget {
	b := &budget{slots: slotCount(g), remaining: slotCount(g), proven: map[string]bool{}}
	last := "" // of thousands of nodes, most have the same
	for _, m := range g.Members {
		if good := m.Summary.Configs[2]; good != last {
			last = good
			b.proven[last] = true
		}
	}
	for _, members := range [][]*member{g.Members, g.Leaving, g.Unaffected} {
		for _, m := range members {
			b.spend(m)
		}
	}
	for _, m := range g.Counted {
		if countsAsUnavailable(m) {
			b.unavailable++
		}
		if m.MadeUnavailable() && m.HoldsSlot {
			b.remaining--
		}
	}
	return b
}

// spend counts a node that holds a slot. One that was lost in a change for pods that wait keeps its taint, and others wait for it no longer.
func (b *budget) spend(m *member) {
	if m.ForDemand && m.Node.IsLost() {
		return
	}
	if countsAsUnavailable(m) {
		b.unavailable++
	}
	if !m.HoldsSlot {
		return
	}
	if m.State == node.Failed {
		b.remaining--
	} else {
		b.count(m)
	}
}

// countsAsUnavailable reports whether a node counts among those that are kept from their users, or is protected in this step.
// One whose slot has expired counts until its scheduling is restored: the write that does
// that may fail, or come after the taint of the node that gets the slot.
func countsAsUnavailable(m *member) bool {
	if !m.MadeUnavailable() {
		return slices.ContainsFunc(m.Actions, func(a action.Action) bool { return action.Stops(a) && m.WithheldFor(a) == 0 })
	}
	return m.HoldsSlot || m.SlotExpired && slices.ContainsFunc(m.Actions, action.RestoresScheduling)
}

func (b *budget) count(m *member) {
	b.remaining--
	if m.Policy == nil {
		return // it goes back to what it was and tries no configuration
	}
	b.others++
	b.since = timing.Latest(b.since, lastStage(m))
	b.alone = b.alone || b.unproven(m)
}

// unproven reports whether no node has reached yet what this one is to get.
func (b *budget) unproven(m *member) bool {
	return m.Desired != nil && !slices.ContainsFunc(m.Desired.Config.Keys(), func(key string) bool { return b.proven[key] })
}

// admit says why a node may not go on, if it may not. One that holds a slot may, unless that would disturb more nodes
// than there are slots: one whose slot had expired may hold one on top of them.
func (b *budget) admit(m *member, paced node.PacedAct) (reason, message string) {
	taints := slices.ContainsFunc(paced.Start, action.KeepsOff)
	makesUnavailable := taints && !m.MadeUnavailable() || m.MadeUnavailable() && !m.HoldsSlot
	switch {
	case m.ForDemand && !makesUnavailable && !taints:
		return "", "" // it takes nothing from anybody
	case makesUnavailable && b.unavailable >= b.slots, taints && b.unavailable > b.slots: // to stop operands so that the node is protected waits for no slot
		return b.full()
	case !m.HoldsSlot:
		reason, message = b.acquireSlot(m)
	}
	if reason == "" && makesUnavailable {
		b.unavailable++
	}
	return reason, message
}

func (b *budget) full() (reason, message string) {
	return v1alpha1.ReasonWaitingForBudget, fmt.Sprintf("Waiting: rollout.maxUnavailable (%d) reached", b.slots)
}

// acquireSlot gives a node a slot, or says why there is none.
func (b *budget) acquireSlot(m *member) (reason, message string) {
	switch {
	case b.remaining <= 0:
		return b.full()
	case m.Policy != nil && b.alone || b.unproven(m) && b.others > 0:
		return v1alpha1.ReasonWaitingForFirst, "waiting until the first node with a new configuration has verified it"
	}
	b.count(m)
	return "", ""
}

// deferAct has a node wait with its next act, for that reason.
func deferAct(m *member, reason, message string) {
	_, paced := node.SplitAct(m.Next)
	m.Actions = append(m.Actions, paced.OnDenied...)
	if m.Node.BaselineLost && !node.AgentNeverRequested(m.View) { // it may be held back for days
		m.Actions = append(m.Actions, keepBaseline(m)...)
	}
	if untilSlotExpires(m); m.MadeUnavailable() && len(paced.OnDenied) == 0 {
		m.After = timing.Sooner(m.After, node.BusyFor(m.View))
	}
	m.Reason, m.Message = reason, format.Beside(message, m.Message)
}

// changeOrder is the one in which nodes are taken: those that hold a slot first, then those that are rolled back, then
// those that are released, then in turn.
func changeOrder(g *Group) []*member {
	order, members := make([]*member, 0, len(g.Members)+len(g.Leaving)), inTurn(g)
	for _, turn := range []func(*member) bool{
		func(m *member) bool { return m.HoldsSlot },
		func(m *member) bool { return !m.HoldsSlot && m.State == node.Failed },
		func(m *member) bool { return !m.HoldsSlot && m.State != node.Failed },
	} {
		for _, nodes := range [][]*member{g.Leaving, members} {
			for _, m := range nodes {
				if turn(m) {
					order = append(order, m)
				}
			}
		}
	}
	return order
}

// inTurn is the order of the nodes that a policy governs: by name. A maintenance window may end before all of them had
// a slot, so in windows nodes that nothing blocks come first, then those whose last turn was the longest ago.
func inTurn(g *Group) []*member {
	if len(g.Windows) == 0 {
		return g.Members
	}
	return slices.SortedStableFunc(slices.Values(g.Members), func(a, b *member) int {
		return cmp.Or(cmp.Compare(min(len(a.Blockers), 1), min(len(b.Blockers), 1)), node.LastTurn(a.View).Compare(node.LastTurn(b.View)))
	})
}

// slotCount is how many nodes may be changing at the same time.
func slotCount(g *Group) int {
	all := len(g.Members) + len(g.Leaving)
	if g.By != nil {
		return scaled(g.By.Spec.Rollout.MaxUnavailable, all)
	}
	least := all
	for _, m := range g.Leaving {
		least = min(least, scaled(m.RolloutSpec().MaxUnavailable, all))
	}
	return max(least, 1)
}

// scaled is a number of nodes, or a percentage of them rounded up; at least 1.
func scaled(n *intstr.IntOrString, of int) int {
	if n == nil {
		return 1
	}
	slots, err := intstr.GetScaledValueFromIntOrPercent(n, of, true)
	if err != nil {
		return 1
	}
	return max(slots, 1)
}

// unrecorded says why a node must not be taken from its users: were its change to fail, that could not be recorded, and
// it would be taken again at once.
func unrecorded(s *cluster.Snapshot, m *member, paced node.PacedAct) (reason, message string) {
	why := s.Repeats.Unreported(m.Node.Name)
	if why == "" || m.HoldsSlot || m.MadeUnavailable() || !slices.ContainsFunc(paced.Start, action.KeepsOff) {
		return "", ""
	}
	return v1alpha1.ReasonWriteFailed, fmt.Sprintf("Waiting: the API server refuses the status of GPUNode %s, and the operator tries again every minute: %s. Look for "+
		"an admission webhook or policy that refuses it", m.Node.Name, format.Cut(why, 512))
}

func waitsForManager(m *member) (reason, message string) {
	return v1alpha1.ReasonMIGManagerBusy, node.ManagerChanging(m.View) + "; the change waits for it"
}

// deferredBy says why no change may start or go on at all on a node, whatever the budget.
func deferredBy(g *Group, s *cluster.Snapshot, m *member) (reason, message string) {
	configReason, configMessage := deferredByConfig(s, m)
	switch {
	case m.Policy == nil && node.ManagerBlocksChange(m.View):
		return waitsForManager(m)
	case m.Policy == nil:
		return "", "" // nothing else holds up the way back
	case g.Invalid != nil:
		return v1alpha1.ReasonInvalidWindow, g.InvalidWindow()
	case g.By.Spec.Rollout.Paused:
		return v1alpha1.ReasonPaused, "the rollout is paused; set rollout.paused to false to let it go on"
	case configReason != "":
		return configReason, configMessage
	case node.ManagerBlocksChange(m.View):
		return waitsForManager(m)
	case g.Halted && m.State != node.Failed:
		return v1alpha1.ReasonRolloutHalted, fmt.Sprintf("the rollout is halted: %s failed (failureThreshold %d); "+
			"look at those, then change the policy", countOfNodes(g.Failures), max(g.By.Spec.Rollout.FailureThreshold, 1))
	case m.ForDemand && g.Changes && !m.MadeUnavailable() && !m.InFlight():
		return v1alpha1.ReasonWaitingForBudget, "Waiting: the rollout of the policy goes before changes for pods that wait"
	}
	return outsideWindow(g, s, m)
}

// deferredByConfig says why what NVIDIA's device plugin must read cannot be there yet.
func deferredByConfig(s *cluster.Snapshot, m *member) (reason, message string) {
	switch {
	case !m.ReadsConfigs():
	case m.Desired != nil && s.FullConfigs[m.Desired.Config.Key] && !m.HoldsSlot:
		return v1alpha1.ReasonConfigMapFull, fmt.Sprintf("Waiting: the operator's ConfigMap for NVIDIA's device plugin has no room for config %s: it holds %d KiB of the "+
			"operator's configs at most. Join policies that ask for the same into one, or delete some", m.Desired.Config.Key, mostConfigBytes>>10)
	case s.ConfigsRefused != "" && !m.HoldsSlot && m.Desired != nil && s.Configs[m.Desired.Config.Key] != m.Desired.Config.Data:
		return v1alpha1.ReasonWriteFailed, fmt.Sprintf("Waiting: the API server refuses the ConfigMap for NVIDIA's device plugin (%s), which is tried again", format.End(s.ConfigsRefused, 60))
	case !s.Plugin.Ready && pluginConfigHeld(s) != "":
		return v1alpha1.ReasonMPSClientsRunning, fmt.Sprintf("Waiting: %s. The policy names them", pluginConfigChange(s))
	case !s.Plugin.Ready:
		return v1alpha1.ReasonConfiguringDevicePlugin, cmp.Or(s.Plugin.Message, "NVIDIA's device plugin is being configured to use the operator's ConfigMap")
	}
	return "", ""
}
