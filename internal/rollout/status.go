// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
)

// status is what is so with a policy.
func (g *group) status(w *World, tolerated tolerance, unmet []string) v1alpha1.GPUSharingPolicyStatus {
	s := v1alpha1.GPUSharingPolicyStatus{
		Nodes: g.counts(), Resources: resources(g.members, mostResources), Pending: g.pending(), NextWindowTime: g.nextWindow,
	}
	s.Conditions = condition.Remove(g.by.Status.Conditions, v1alpha1.ConditionAutoscalingConfigured) // another controller's
	observed := g.observed()
	s.ObservedGeneration = observed
	set := func(c metav1.Condition, found func([]metav1.Condition, metav1.Condition) []metav1.Condition) {
		c.ObservedGeneration = observed
		s.Conditions = found(s.Conditions, c)
	}
	always := func(list []metav1.Condition, c metav1.Condition) []metav1.Condition {
		return condition.Set(list, c, w.Now)
	}
	whenTrue := func(list []metav1.Condition, c metav1.Condition) []metav1.Condition {
		return condition.SetWhenTrue(list, c, w.Now)
	}
	accepted := g.accepted(w)
	ready := g.ready(accepted)
	set(accepted, always)
	set(ready, always)
	s.Conditions = condition.SetProgress(s.Conditions, g.stalled(accepted, ready), w.Now)
	set(affected(unmet), whenTrue)
	if tainted, asked := g.tainted(tolerated); asked {
		set(tainted, always)
	} else {
		s.Conditions = condition.Remove(s.Conditions, v1alpha1.ConditionTainted)
	}
	return s
}

func (g *group) counts() v1alpha1.NodeCounts {
	c := v1alpha1.NodeCounts{Matched: int32(len(g.members) + len(g.lost)), Conflicted: int32(len(g.lost))}
	for _, m := range g.members {
		stands := m.standing()
		switch {
		case stands == nodeReady:
			c.Ready++
		case stands == nodeFailed || stands == nodeUnsupported:
			c.Failed++
		case m.holds:
			c.Changing++
		default:
			c.Waiting++
		}
		if stands == nodeBlocked {
			c.Blocked++
		}
		if updated(m.State) {
			c.Updated++
		}
	}
	return c
}

// standing is how the node counts.
func (m *member) standing() standing { return standingOf(m.State, m.reason) }

// worstFirst sorts nodes by their standing, the worst first, and those of one standing by name.
func worstFirst(members []*member) {
	slices.SortFunc(members, func(a, b *member) int {
		return cmp.Or(cmp.Compare(a.standing(), b.standing()), cmp.Compare(a.node.Name, b.node.Name))
	})
}

// pending lists the nodes that are not ready or on which something is left undone, each with its reason, the worst first, and then
// those that another policy governs: as many as there is room for.
func (g *group) pending() []v1alpha1.PendingNode {
	const most, length = v1alpha1.MostPending, 2048 // of the schema
	var listed []*member
	for _, m := range g.members {
		if m.State != StateUpToDate || m.reason != v1alpha1.ReasonReady {
			listed = append(listed, m)
		}
	}
	worstFirst(listed)
	var pending []v1alpha1.PendingNode
	for _, m := range listed[:min(len(listed), most)] {
		pending = append(pending, v1alpha1.PendingNode{
			NodeName: m.node.Name, State: string(m.State), Reason: m.reason, Message: cut(m.message, length), Plan: m.planned(),
			InTheWay: m.foretold(), Resources: resources([]*member{m}, mostOfANode),
		})
	}
	for _, l := range g.lost[:min(len(g.lost), most-len(pending))] {
		pending = append(pending, v1alpha1.PendingNode{
			NodeName: l.node, Reason: v1alpha1.ReasonConflicted,
			Message: fmt.Sprintf("policy %s governs the node; give this one a higher priority, or select other nodes", l.to),
		})
	}
	return pending
}

// accepted says whether the policy governs what it selects.
func (g *group) accepted(w *World) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse}
	switch {
	case w.Wiring.Reason != "":
		c.Reason, c.Message = w.Wiring.Reason, w.Wiring.Message
	case g.invalid != nil:
		c.Reason, c.Message = v1alpha1.ReasonInvalidWindow, g.invalidWindow()
	case len(g.lost) > 0:
		c.Reason, c.Message = v1alpha1.ReasonConflicted, g.conflict()
	case len(g.members) == 0:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonNoMatchingNodes
		c.Message = "no GPU node has the labels, or no reported GPU the products and indexes, that the policy selects; " +
			"compare nodeSelector with `kubectl get nodes --show-labels` and gpuSelector with `kubectl get gpunodes`"
	case g.by.Spec.Rollout.Paused:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonPaused
		c.Message = "the rollout is paused; status.pending says what would be done"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonAccepted
		c.Message = fmt.Sprintf("the policy governs %s", nodes(len(g.members)))
	}
	return c
}

// conflict says who governs the nodes that the policy does not.
func (g *group) conflict() string {
	by := map[string][]string{}
	for _, l := range g.lost {
		by[l.to] = append(by[l.to], l.node)
	}
	var parts []string
	for _, winner := range slices.Sorted(maps.Keys(by)) {
		parts = append(parts, fmt.Sprintf("policy %s governs %s", winner, list(by[winner])))
	}
	return strings.Join(parts, "; ") + "; give this policy a higher priority, or select other nodes"
}

// ready says whether every governed node advertises what the policy asks for.
func (g *group) ready(accepted metav1.Condition) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse}
	waiting := g.unready()
	switch {
	case g.invalid != nil:
		c.Reason, c.Message = accepted.Reason, accepted.Message
	case len(g.awaited) > 0 && len(waiting) == 0:
		c.Reason = v1alpha1.ReasonAgentNotReporting
		c.Message = fmt.Sprintf("gpuSelector may select GPUs of nodes whose agents have not reported any: %s; look at the pods with "+
			"app.kubernetes.io/name=gpu-sharing-agent there", list(g.awaited))
	case len(g.members) == 0:
		c.Status, c.Reason, c.Message = accepted.Status, accepted.Reason, accepted.Message // nothing is to be done, as for a DaemonSet without nodes
	case len(waiting) == 0:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonReady
		c.Message = fmt.Sprintf("%s advertise what the policy asks for", nodes(len(g.members)))
		if len(g.members) == 1 {
			c.Message = "1 node advertises what the policy asks for"
		}
	default:
		c.Reason = reason(waiting)
		c.Message = fmt.Sprintf("%d of %s ready; %s", len(g.members)-len(waiting), nodes(len(g.members)), sentences(waiting))
	}
	return c
}

func (g *group) unready() []*member {
	var waiting []*member
	for _, m := range g.members {
		if m.State != StateUpToDate {
			waiting = append(waiting, m)
		}
	}
	return waiting
}

// reason is the one that the user should read first: what failed, what holds everything up, then what goes on.
func reason(waiting []*member) string {
	first := waiting[0].reason
	for _, m := range waiting {
		if m.State == StateFailed || m.State == StateImpossible {
			return m.reason
		}
	}
	for _, m := range waiting {
		if slices.Contains([]string{v1alpha1.ReasonPaused, v1alpha1.ReasonInvalidWindow, v1alpha1.ReasonConfiguringDevicePlugin, v1alpha1.ReasonMPSClientsRunning}, m.reason) {
			return m.reason
		}
		if m.reason != first {
			first = v1alpha1.ReasonProgressing
		}
	}
	return first
}

// sentences tells about the first few nodes, the worst first.
func sentences(waiting []*member) string {
	const most, length = 3, 1024
	ordered := slices.Clone(waiting)
	worstFirst(ordered)
	var parts []string
	for _, m := range ordered[:min(len(ordered), most)] {
		parts = append(parts, fmt.Sprintf("node %s: %s", m.node.Name, m.message))
	}
	if more := len(ordered) - most; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more, see status.pending", more))
	}
	return cut(strings.Join(parts, "; "), length)
}

// stalled is true if only a changed policy, node or cluster helps: every node that is not ready is unsupported, failed and rolled back, or
// held back by a rollout that is halted.
func (g *group) stalled(accepted, ready metav1.Condition) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionStalled, Status: metav1.ConditionFalse, Reason: ready.Reason, Message: ready.Message,
	}
	waiting := g.unready()
	if (len(g.members) == 0 || g.invalid != nil) && accepted.Status == metav1.ConditionFalse {
		c.Status = metav1.ConditionTrue
		return c
	}
	if len(waiting) > 0 && !slices.ContainsFunc(waiting, func(m *member) bool { return !m.ended() }) {
		c.Status = metav1.ConditionTrue
	}
	return c
}

func nodes(n int) string {
	if n == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", n)
}
