// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// What is reported is worded here: the conditions of a policy, the counts and messages of its nodes.
//
//	groups → computeStatus → GPUSharingPolicy.status
//	member → nodeStateOf → node state for CLI, metrics and Events

// observedGeneration returns the generation of the policy that its conditions are about.
func observedGeneration(g *Group) int64 {
	if g.Unrecorded == 0 {
		return g.By.Generation
	}
	last, _ := condition.Find(g.By.Status.Conditions, v1alpha1.ConditionAccepted) // all that earlier versions reported
	return cmp.Or(g.By.Status.ObservedGeneration, last.ObservedGeneration)
}

// ownConditions are the conditions of a policy without those that other controllers report.
func ownConditions(conditions []metav1.Condition) []metav1.Condition {
	for _, another := range v1alpha1.ConditionsOfOthers() {
		conditions = condition.Remove(conditions, another)
	}
	return conditions
}

// computeStatus is the status of a policy.
func computeStatus(g *Group, snapshot *cluster.Snapshot, tolerated tolerance, unmet []string) v1alpha1.GPUSharingPolicyStatus {
	s := v1alpha1.GPUSharingPolicyStatus{
		Nodes: nodeCounts(g), Resources: resourceCounts(g.Members, mostResources), Pending: pendingNodes(g), NextWindowTime: g.NextWindow,
	}
	s.Conditions = ownConditions(g.By.Status.Conditions)
	observed := observedGeneration(g)
	s.ObservedGeneration = observed
	set := func(c metav1.Condition, found func([]metav1.Condition, metav1.Condition) []metav1.Condition) {
		c.ObservedGeneration = observed
		s.Conditions = found(s.Conditions, c)
	}
	always := func(list []metav1.Condition, c metav1.Condition) []metav1.Condition {
		return condition.Set(list, c, snapshot.Now)
	}
	whenTrue := func(list []metav1.Condition, c metav1.Condition) []metav1.Condition {
		return condition.SetWhenTrue(list, c, snapshot.Now)
	}
	accepted := acceptedCondition(g, snapshot)
	ready := readyCondition(g, accepted)
	set(accepted, always)
	set(ready, always)
	s.Conditions = condition.SetProgress(s.Conditions, stalledCondition(g, accepted, ready), snapshot.Now)
	set(affectedCondition(unmet), whenTrue)
	if tainted, requested := taintsCondition(g, tolerated); requested {
		set(tainted, always)
	} else {
		s.Conditions = condition.Remove(s.Conditions, v1alpha1.ConditionTainted)
	}
	return s
}

func nodeCounts(g *Group) v1alpha1.NodeCounts {
	c := v1alpha1.NodeCounts{Matched: int32(len(g.Members) + g.lost()), Conflicted: int32(g.lost())}
	for _, m := range g.Members {
		stands := standingOf(m)
		switch {
		case stands == node.NodeReady:
			c.Ready++
		case stands == node.NodeFailed || stands == node.NodeUnsupported:
			c.Failed++
		case m.HoldsSlot:
			c.Changing++
		default:
			c.Waiting++
		}
		if stands == node.NodeBlocked {
			c.Blocked++
		}
		if node.Updated(m.State) {
			c.Updated++
		}
	}
	return c
}

// standingOf is how the node counts.
func standingOf(m *member) node.Standing { return node.StandingOf(m.State, m.Reason) }

// worstFirst sorts nodes by their standing, the worst first, and those of one standing by name.
func worstFirst(members []*member) {
	slices.SortFunc(members, func(a, b *member) int {
		return cmp.Or(cmp.Compare(standingOf(a), standingOf(b)), cmp.Compare(a.Node.Name, b.Node.Name))
	})
}

// pendingNodes lists the nodes that are not ready or on which something is left undone, each with its reason, the worst
// first, and then those that another policy governs: as many as there is room for.
func pendingNodes(g *Group) []v1alpha1.PendingNode {
	const most = v1alpha1.MostPending // of the schema
	var listed []*member
	for _, m := range g.Members {
		if m.State != node.UpToDate || m.Reason != v1alpha1.ReasonReady {
			listed = append(listed, m)
		}
	}
	worstFirst(listed)
	var pending []v1alpha1.PendingNode
	for _, m := range listed[:min(len(listed), most)] {
		pending = append(pending, v1alpha1.PendingNode{
			NodeName: m.Node.Name, State: string(m.State), Reason: m.Reason, Message: format.Message(m.Message),
		})
	}
	return append(pending, lostPending(g, most-len(pending))...)
}

// lostPending lists the nodes that other policies govern, at most so many.
func lostPending(g *Group, most int) []v1alpha1.PendingNode {
	var pending []v1alpha1.PendingNode
	for _, l := range g.Lost {
		for _, name := range l.Nodes[:min(len(l.Nodes), most)] {
			pending = append(pending, v1alpha1.PendingNode{
				NodeName: name, Reason: v1alpha1.ReasonConflicted,
				Message: fmt.Sprintf("Policy %s governs the node; give this one a higher priority, or select other nodes", l.To),
			})
		}
	}
	slices.SortFunc(pending, func(a, b v1alpha1.PendingNode) int { return cmp.Compare(a.NodeName, b.NodeName) })
	return pending[:min(len(pending), most)]
}

// acceptedCondition reports whether the policy governs what it selects.
func acceptedCondition(g *Group, s *cluster.Snapshot) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse}
	switch {
	case g.Beyond > 0:
		c.Reason = v1alpha1.ReasonTooManyPolicies
		c.Message = fmt.Sprintf("The cluster has %d policies, and the operator follows %d: those that govern nodes, then the oldest, and not this one. "+
			"Delete policies that nobody needs, or join those that ask for the same", g.Beyond, policy.MostPolicies)
	case s.Plugin.Reason != "" && len(g.Members) == 0:
		c.Reason, c.Message = s.Plugin.Reason, s.Plugin.Message
	case g.Invalid != nil:
		c.Reason, c.Message = v1alpha1.ReasonInvalidWindow, g.InvalidWindow()
	case len(g.Lost) > 0:
		c.Reason, c.Message = v1alpha1.ReasonConflicted, conflictMessage(g)
	case len(g.Members) == 0:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonNoMatchingNodes
		c.Message = "No GPU node has the labels, products and indexes that it selects; compare `kubectl get nodes --show-labels` and " +
			"`kubectl get gpunodes`. If an autoscaler makes the nodes, set autoscaling.emptyPool"
		if g.By.Spec.Autoscaling.EmptyPool == v1alpha1.EmptyPoolExpected {
			c.Message = "No node is there, as autoscaling.emptyPool expects"
		}
	case g.By.Spec.Rollout.Paused:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonPaused
		c.Message = "The rollout is paused; `kubectl gpusharing status` says what would be done"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonAccepted
		c.Message = fmt.Sprintf("The policy governs %s", countOfNodes(len(g.Members)))
	}
	return c
}

// conflictMessage says who governs the nodes that the policy does not.
func conflictMessage(g *Group) string {
	by := map[string][]string{}
	for _, l := range g.Lost {
		if other := by[l.To]; other != nil { // the nodes of each are by name already
			l.Nodes = slices.Sorted(slices.Values(slices.Concat(other, l.Nodes)))
		}
		by[l.To] = l.Nodes
	}
	const do = "; give this policy a higher priority, or select other nodes"
	var parts []string
	for _, winner := range slices.Sorted(maps.Keys(by)) {
		parts = append(parts, fmt.Sprintf("policy %s governs %s", winner, format.Few(by[winner], mostNodes)))
	}
	return format.Fit(parts, format.MostMessage-len(do), func(i int) string {
		return fmt.Sprintf("%d more policies govern others", len(parts)-i)
	}) + do
}

// YieldsByPriority reports whether a policy governs nodes, and leaves others only to policies of higher priority: that is
// what priorities are for, and no conflict that anybody must settle.
func YieldsByPriority(s *cluster.Snapshot, name string) bool {
	governs, ranking := false, policy.Rank(s.Policies)
	for i := range s.Nodes {
		g := ranking.Govern(node.PolicyNode(&s.Nodes[i]))
		governs = governs || g.By != nil && g.By.Name == name
		if slices.ContainsFunc(g.Over, func(p *v1alpha1.GPUSharingPolicy) bool {
			return p.Name == name && p.Spec.Priority >= g.By.Spec.Priority
		}) {
			return false
		}
	}
	return governs
}

// readyCondition reports whether every governed node advertises what the policy asks for.
func readyCondition(g *Group, accepted metav1.Condition) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse}
	waiting := unreadyMembers(g)
	switch {
	case g.Invalid != nil:
		c.Reason, c.Message = accepted.Reason, accepted.Message
	case len(g.Awaited) > 0 && len(waiting) == 0:
		c.Reason = v1alpha1.ReasonAgentNotReporting
		c.Message = fmt.Sprintf("gpuSelector may select GPUs of nodes whose agents have not reported any: %s; look at the pods with "+
			"app.kubernetes.io/name=gpu-sharing-agent there", format.Few(g.Awaited, mostNodes))
	case len(g.Members) == 0:
		c.Status, c.Reason, c.Message = accepted.Status, accepted.Reason, accepted.Message
		if g.By.Spec.Autoscaling.EmptyPool != v1alpha1.EmptyPoolExpected {
			c.Status = metav1.ConditionFalse
		}
	case len(waiting) == 0:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonReady
		c.Message = fmt.Sprintf("%s advertise what the policy asks for", countOfNodes(len(g.Members)))
		if len(g.Members) == 1 {
			c.Message = "1 node advertises what the policy asks for"
		}
	default:
		c.Reason = waitingReason(waiting)
		c.Message = fmt.Sprintf("%d of %s ready; ", len(g.Members)-len(waiting), countOfNodes(len(g.Members)))
		held := pluginConfigHeld(waiting[0].Snapshot)
		if c.Reason == v1alpha1.ReasonSelecting && held != "" && !waiting[0].Snapshot.Plugin.Ready { // set anew by others in the middle of a change
			c.Reason = v1alpha1.ReasonMPSClientsRunning
		}
		if c.Reason == v1alpha1.ReasonMPSClientsRunning {
			c.Message += "waiting: " + held
			break
		}
		c.Message += waitingSentences(waiting, format.MostMessage-len(c.Message))
	}
	return c
}

func unreadyMembers(g *Group) []*member {
	var waiting []*member
	for _, m := range g.Members {
		if m.State != node.UpToDate {
			waiting = append(waiting, m)
		}
	}
	return waiting
}

// waitingReason is the one that the user should read first: what failed, what holds everything up, then what goes on.
func waitingReason(waiting []*member) string {
	first := waiting[0].Reason
	for _, m := range waiting {
		if m.State == node.Failed || m.State == node.Unsupported {
			return m.Reason
		}
	}
	for _, m := range waiting {
		if node.ClassOf(m.Reason).Is(node.First) {
			return m.Reason
		}
		if m.Reason != first {
			first = v1alpha1.ReasonProgressing
		}
	}
	return first
}

// waitingSentences tells why nodes wait, the worst first and the same reason once, in so many characters.
func waitingSentences(waiting []*member, most int) string {
	ordered := slices.Clone(waiting)
	worstFirst(ordered)
	var messages, clauses []string
	names := map[string][]string{}
	for _, m := range ordered {
		if names[m.Message] == nil {
			messages = append(messages, m.Message)
		}
		names[m.Message] = append(names[m.Message], m.Node.Name)
	}
	for _, message := range messages {
		clauses = append(clauses, fmt.Sprintf("%s: %s", nodesNamed(names[message]), message))
	}
	return format.Fit(clauses, most, func(i int) string {
		told := 0
		for _, message := range messages[:i] {
			told += len(names[message])
		}
		return fmt.Sprintf("%d more, see status.pending", len(waiting)-told)
	})
}

func nodesNamed(names []string) string {
	if len(names) == 1 {
		return "node " + names[0]
	}
	return "nodes " + format.Few(names, mostNodes)
}

// mostNodes is how many nodes a clause names.
const mostNodes = 2

// stalledCondition is true if only a changed policy, node or cluster helps: every node that is not ready is
// unsupported, failed and rolled back, or held back by a rollout that is halted.
func stalledCondition(g *Group, accepted, ready metav1.Condition) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionStalled, Status: metav1.ConditionFalse, Reason: ready.Reason, Message: ready.Message,
	}
	waiting := unreadyMembers(g)
	matchesNone := ready.Reason == v1alpha1.ReasonNoMatchingNodes && ready.Status == metav1.ConditionFalse
	if (len(g.Members) == 0 || g.Invalid != nil) && accepted.Status == metav1.ConditionFalse || matchesNone {
		c.Status = metav1.ConditionTrue
		return c
	}
	if len(waiting) > 0 && !slices.ContainsFunc(waiting, func(m *member) bool { return !hasEnded(m) }) {
		c.Status = metav1.ConditionTrue
	}
	return c
}

func countOfNodes(n int) string {
	if n == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", n)
}

// Undecided returns the status of each policy, by name, while the controller cannot decide: what was reported last, but
// Ready is Unknown, because nothing tells whether it still is so. The message says what the controller waits for and
// what to look at.
func Undecided(policies []v1alpha1.GPUSharingPolicy, message string, now time.Time) map[string]v1alpha1.GPUSharingPolicyStatus {
	const length = 1024
	all := make(map[string]v1alpha1.GPUSharingPolicyStatus, len(policies))
	for i := range policies {
		s := *policies[i].Status.DeepCopy()
		s.NodeGroups, s.Conditions = nil, ownConditions(s.Conditions)
		s.Pending = s.Pending[:min(len(s.Pending), v1alpha1.MostPending)] // earlier versions listed more, which the API server refuses now
		for _, kind := range []string{v1alpha1.ConditionAccepted, v1alpha1.ConditionReady} {
			last, reported := condition.Find(s.Conditions, kind)
			if reported && last.Status != metav1.ConditionUnknown && kind == v1alpha1.ConditionAccepted {
				continue
			}
			s.Conditions = condition.Set(s.Conditions, metav1.Condition{
				Type: kind, Status: metav1.ConditionUnknown, ObservedGeneration: last.ObservedGeneration,
				Reason: v1alpha1.ReasonClusterNotRead, Message: format.Cut(message, length),
			}, now)
		}
		s.Conditions = condition.SetProgress(s.Conditions, metav1.Condition{}, now)
		all[policies[i].Name] = s
	}
	return all
}

// How many resources the schema lets a status list.
const (
	mostResources = 64 // of a policy
	mostOfANode   = 16

	longestResource = 63 // its name; one that is longer is no resource of the operator's
)

// countsOf returns what a node advertises of GPUs and instances and what it is expected to, by resource.
func countsOf(v *node.View) []v1alpha1.ResourceCount {
	counts := map[string]v1alpha1.ResourceCount{}
	if v.Desired != nil {
		for name, count := range v.Desired.Config.Resources {
			c := counts[name]
			c.Expected = count
			counts[name] = c
		}
		for name, replicas := range v.Desired.Config.Replicas {
			c := counts[name]
			c.Oversubscription = replicas
			counts[name] = c
		}
	}
	for name, count := range v.Node.OfferedGPUs(v.Stack) {
		if len(name) <= longestResource {
			c := counts[name]
			c.Advertised = count
			counts[name] = c
		}
	}
	list := make([]v1alpha1.ResourceCount, 0, len(counts))
	for name, c := range counts {
		c.Name = name
		list = append(list, c)
	}
	return list
}

// resourceCounts sums the counts of nodes by resource; the first most of them by name.
func resourceCounts(members []*member, most int) []v1alpha1.ResourceCount {
	sums := map[string]*v1alpha1.ResourceCount{}
	for _, m := range members {
		for _, c := range m.Demand.Counts {
			sum := sums[c.Name]
			if sum == nil {
				sum = &v1alpha1.ResourceCount{Name: c.Name}
				sums[c.Name] = sum
			}
			sum.Expected += c.Expected
			sum.Advertised += c.Advertised
			sum.Oversubscription = max(sum.Oversubscription, c.Oversubscription)
		}
	}
	var list []v1alpha1.ResourceCount
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		list = append(list, *sums[name])
	}
	return list[:min(len(list), most)]
}
