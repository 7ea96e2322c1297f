// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/group"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/taints"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/workloads"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// observed returns the generation of the policy that its conditions are about.
func observed(g *group.Group) int64 {
	if g.Unrecorded == 0 {
		return g.By.Generation
	}
	last, _ := condition.Find(g.By.Status.Conditions, v1alpha1.ConditionAccepted) // all that earlier versions reported
	return cmp.Or(g.By.Status.ObservedGeneration, last.ObservedGeneration)
}

// own are the conditions of a policy without those that the controllers of autoscaling and of the memory guard report.
func own(conditions []metav1.Condition) []metav1.Condition {
	return condition.Remove(condition.Remove(conditions, v1alpha1.ConditionAutoscalingConfigured), v1alpha1.ConditionMemoryPressure)
}

// Of is what is so with a policy.
func Of(g *group.Group, w *world.World, tolerated taints.Tolerance, unmet []string) v1alpha1.GPUSharingPolicyStatus {
	s := v1alpha1.GPUSharingPolicyStatus{
		Nodes: counts(g), Resources: resources(g.Members, mostResources), Pending: pending(g), NextWindowTime: g.NextWindow,
	}
	s.Conditions = own(g.By.Status.Conditions)
	observed := observed(g)
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
	accepted := accepted(g, w)
	ready := ready(g, accepted)
	set(accepted, always)
	set(ready, always)
	s.Conditions = condition.SetProgress(s.Conditions, stalled(g, accepted, ready), w.Now)
	set(workloads.Affected(unmet), whenTrue)
	if tainted, asked := taints.Condition(g, tolerated); asked {
		set(tainted, always)
	} else {
		s.Conditions = condition.Remove(s.Conditions, v1alpha1.ConditionTainted)
	}
	return s
}

func counts(g *group.Group) v1alpha1.NodeCounts {
	c := v1alpha1.NodeCounts{Matched: int32(len(g.Members) + len(g.Lost)), Conflicted: int32(len(g.Lost))}
	for _, m := range g.Members {
		stands := standing(m)
		switch {
		case stands == state.NodeReady:
			c.Ready++
		case stands == state.NodeFailed || stands == state.NodeUnsupported:
			c.Failed++
		case m.Holds:
			c.Changing++
		default:
			c.Waiting++
		}
		if stands == state.NodeBlocked {
			c.Blocked++
		}
		if state.Updated(m.State) {
			c.Updated++
		}
	}
	return c
}

// standing is how the node counts.
func standing(m *group.Member) state.Standing { return state.StandingOf(m.State, m.Reason) }

// worstFirst sorts nodes by their standing, the worst first, and those of one standing by name.
func worstFirst(members []*group.Member) {
	slices.SortFunc(members, func(a, b *group.Member) int {
		return cmp.Or(cmp.Compare(standing(a), standing(b)), cmp.Compare(a.Node.Name, b.Node.Name))
	})
}

// pending lists the nodes that are not ready or on which something is left undone, each with its reason, the worst first, and then
// those that another policy governs: as many as there is room for.
func pending(g *group.Group) []v1alpha1.PendingNode {
	const most, length = v1alpha1.MostPending, 2048 // of the schema
	var listed []*group.Member
	for _, m := range g.Members {
		if m.State != state.UpToDate || m.Reason != v1alpha1.ReasonReady {
			listed = append(listed, m)
		}
	}
	worstFirst(listed)
	var pending []v1alpha1.PendingNode
	for _, m := range listed[:min(len(listed), most)] {
		pending = append(pending, v1alpha1.PendingNode{
			NodeName: m.Node.Name, State: string(m.State), Reason: m.Reason, Message: format.Cut(m.Message, length),
		})
	}
	for _, l := range g.Lost[:min(len(g.Lost), most-len(pending))] {
		pending = append(pending, v1alpha1.PendingNode{
			NodeName: l.Node, Reason: v1alpha1.ReasonConflicted,
			Message: fmt.Sprintf("policy %s governs the node; give this one a higher priority, or select other nodes", l.To),
		})
	}
	return pending
}

// accepted says whether the policy governs what it selects.
func accepted(g *group.Group, w *world.World) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse}
	switch {
	case w.Plugin.Reason != "" && len(g.Members) == 0:
		c.Reason, c.Message = w.Plugin.Reason, w.Plugin.Message
	case g.Invalid != nil:
		c.Reason, c.Message = v1alpha1.ReasonInvalidWindow, g.InvalidWindow()
	case len(g.Lost) > 0:
		c.Reason, c.Message = v1alpha1.ReasonConflicted, conflict(g)
	case len(g.Members) == 0:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonNoMatchingNodes
		c.Message = "no GPU node has the labels, or no reported GPU the products and indexes, that the policy selects; " +
			"compare nodeSelector with `kubectl get nodes --show-labels` and gpuSelector with `kubectl get gpunodes`"
	case g.By.Spec.Rollout.Paused:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonPaused
		c.Message = "the rollout is paused; `kubectl gpusharing status` says what would be done, and status.rollout of each GPUNode"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonAccepted
		c.Message = fmt.Sprintf("the policy governs %s", nodes(len(g.Members)))
	}
	return c
}

// conflict says who governs the nodes that the policy does not.
func conflict(g *group.Group) string {
	by := map[string][]string{}
	for _, l := range g.Lost {
		by[l.To] = append(by[l.To], l.Node)
	}
	var parts []string
	for _, winner := range slices.Sorted(maps.Keys(by)) {
		parts = append(parts, fmt.Sprintf("policy %s governs %s", winner, format.List(by[winner])))
	}
	return strings.Join(parts, "; ") + "; give this policy a higher priority, or select other nodes"
}

// ready says whether every governed node advertises what the policy asks for.
func ready(g *group.Group, accepted metav1.Condition) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse}
	waiting := unready(g)
	switch {
	case g.Invalid != nil:
		c.Reason, c.Message = accepted.Reason, accepted.Message
	case len(g.Awaited) > 0 && len(waiting) == 0:
		c.Reason = v1alpha1.ReasonAgentNotReporting
		c.Message = fmt.Sprintf("gpuSelector may select GPUs of nodes whose agents have not reported any: %s; look at the pods with "+
			"app.kubernetes.io/name=gpu-sharing-agent there", format.List(g.Awaited))
	case len(g.Members) == 0:
		c.Status, c.Reason, c.Message = accepted.Status, accepted.Reason, accepted.Message // nothing is to be done, as for a DaemonSet without nodes
	case len(waiting) == 0:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonReady
		c.Message = fmt.Sprintf("%s advertise what the policy asks for", nodes(len(g.Members)))
		if len(g.Members) == 1 {
			c.Message = "1 node advertises what the policy asks for"
		}
	default:
		c.Reason = reason(waiting)
		c.Message = fmt.Sprintf("%d of %s ready; %s", len(g.Members)-len(waiting), nodes(len(g.Members)), sentences(waiting))
		if c.Reason == v1alpha1.ReasonMPSClientsRunning {
			c.Message = fmt.Sprintf("Waiting: %s; %s", taints.PluginConfigHeld(waiting[0].World), c.Message)
		}
	}
	return c
}

func unready(g *group.Group) []*group.Member {
	var waiting []*group.Member
	for _, m := range g.Members {
		if m.State != state.UpToDate {
			waiting = append(waiting, m)
		}
	}
	return waiting
}

// reason is the one that the user should read first: what failed, what holds everything up, then what goes on.
func reason(waiting []*group.Member) string {
	first := waiting[0].Reason
	for _, m := range waiting {
		if m.State == state.Failed || m.State == state.Unsupported {
			return m.Reason
		}
	}
	for _, m := range waiting {
		if slices.Contains([]string{v1alpha1.ReasonPaused, v1alpha1.ReasonInvalidWindow, v1alpha1.ReasonConfiguringDevicePlugin, v1alpha1.ReasonMPSClientsRunning}, m.Reason) {
			return m.Reason
		}
		if m.Reason != first {
			first = v1alpha1.ReasonProgressing
		}
	}
	return first
}

// sentences tells about the first few nodes, the worst first.
func sentences(waiting []*group.Member) string {
	const most, length = 3, 1024
	ordered := slices.Clone(waiting)
	worstFirst(ordered)
	var parts []string
	for _, m := range ordered[:min(len(ordered), most)] {
		parts = append(parts, fmt.Sprintf("node %s: %s", m.Node.Name, m.Message))
	}
	if more := len(ordered) - most; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more, see status.pending", more))
	}
	return format.Cut(strings.Join(parts, "; "), length)
}

// stalled is true if only a changed policy, node or cluster helps: every node that is not ready is unsupported, failed and rolled back, or
// held back by a rollout that is halted.
func stalled(g *group.Group, accepted, ready metav1.Condition) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionStalled, Status: metav1.ConditionFalse, Reason: ready.Reason, Message: ready.Message,
	}
	waiting := unready(g)
	if (len(g.Members) == 0 || g.Invalid != nil) && accepted.Status == metav1.ConditionFalse {
		c.Status = metav1.ConditionTrue
		return c
	}
	if len(waiting) > 0 && !slices.ContainsFunc(waiting, func(m *group.Member) bool { return !ended(m) }) {
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
