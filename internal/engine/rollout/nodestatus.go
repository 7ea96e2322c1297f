// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The controller reports on each node in the status of its GPUNode, beside what the agent reports there. To report each
// stage of each node would cost more writes than the change itself, so a report is due
//
//	at the end     the node is ready, has failed or is unsupported
//	while it waits for pods, the budget, a window, an agent: once, and again when the reason or the blockers change; for the first
//	             node of its policy once that takes longer than a report is worth, since all others wait for it
//	while it is at work  at the begin of a change that disrupts the node, and where a stage takes longer than a report is worth
//
// Until then the last report is about an older generation or an earlier moment: observedGeneration tells that.

// reportAt is how long a stage of a change takes before it is reported.
const reportAt = 30 * time.Second

// reportAction returns the report that is due about the node, and takes from the actions what it records.
func reportAction(m *member) (action.Report, bool) {
	report := action.Report{Node: m.Node.Name, Policy: m.Ref()}
	if m.Node.NoGPUNode {
		return report, false
	}
	records := false
	m.Actions = slices.DeleteFunc(slices.Clone(m.Actions), func(a action.Action) bool {
		r, is := a.(action.Report)
		if is {
			report, records = r, true
		}
		return is
	})
	if !records {
		report.Status.Rollout.LastGood, report.Status.Rollout.Failed = lasting(m)
	}
	have := ReportedStatus(m.Node.GPU.Status)
	if !records && (goesOn(m, have) || reportUnseen(m, have)) {
		return report, false
	}
	if f := report.Status.Rollout.Failed; records && f != nil {
		m.Reason, m.Message = f.Reason, f.Message
	}
	report.Status = nodeStatus(m, have, report.Status.Rollout)
	if !records {
		report.Why = "reporting " + nodeReadyCondition(m).Reason
	}
	_, maintained := node.UnderMaintenance(m.View)
	report.Stuck = m.Policy == nil && m.HasStatus() && (maintained || m.HeldUp())
	return report, !equality.Semantic.DeepEqual(have, report.Status)
}

// hasNews reports whether a report is due about a node of which nothing else is to be done.
func hasNews(m *member) bool {
	_, news := reportAction(m)
	return news
}

// ReportedStatus returns what the controller has reported in the status of a GPUNode.
func ReportedStatus(s v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus {
	reported := v1alpha1.GPUNodeStatus{ObservedGeneration: s.ObservedGeneration, Rollout: s.Rollout}
	for _, conditionType := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled} {
		if c, found := condition.Find(s.Conditions, conditionType); found {
			reported.Conditions = append(reported.Conditions, c)
		}
	}
	return reported
}

// reportUnseen reports whether nothing is known of a node yet, and the defaults of the API report just that.
func reportUnseen(m *member, have v1alpha1.GPUNodeStatus) bool {
	return have.ObservedGeneration == 0 && nodeReadyCondition(m).Reason == v1alpha1.ReasonAwaitingReport
}

// lasting returns the part of the status that outlasts a report: the last good state, and the desired state that failed
// as long as it counts.
func lasting(m *member) (*v1alpha1.NodeSharing, *v1alpha1.FailedChange) {
	last := m.Node.GPU.Status.Rollout
	if m.Node.GPU.Spec.Baseline == nil {
		return nil, nil
	}
	if f := last.Failed; f != nil && (node.FailureSuperseded(m.View, *f) || (m.Policy == nil || m.Desired != nil) && !m.FallsBack && m.SpecMatchesTarget()) {
		return last.LastGood, nil
	}
	return last.LastGood, last.Failed
}

// goesOn reports whether the node is at work and was reported well enough: it begins its next stage now, or its last
// stage was a moment ago, or that of the node that goes first. One that failed is not at work. A node that is kept from
// its users is not reported as ready meanwhile.
func goesOn(m *member, have v1alpha1.GPUNodeStatus) bool {
	if _, reported := condition.Find(have.Conditions, v1alpha1.ConditionReady); !reported {
		return false // kstatus takes a GPUNode without conditions for one that is done
	}
	if m.Node.GPU.Spec.ChangeTime.IsZero() && have.Rollout.LastGood != nil {
		return false // it was forgotten, and would count again once the agent is asked for something else (982606)
	}
	if slices.ContainsFunc(m.Actions, leadsOn) {
		return true // and is reported in the next reconcile, if it has come no further then
	}
	last := m.FirstSince
	switch {
	case m.State == node.Failed: // its reason may be the stage in which it failed
		return false
	case m.Reason == v1alpha1.ReasonWaitingForFirst:
	case node.ClassOf(m.Reason).Is(node.UnderWay):
		last = lastStage(m)
	default:
		return false
	}
	remaining := last.Add(reportAt).Sub(m.Snapshot.Now)
	if remaining <= 0 || m.MadeUnavailable() && condition.IsTrue(have.Conditions, v1alpha1.ConditionReady) {
		return false
	}
	m.After = timing.Sooner(m.After, remaining)
	return true
}

// lastStage is when the node began its last stage. One that has made none begins now.
func lastStage(m *member) time.Time {
	last := timing.Latest(m.Node.GPU.Spec.ChangeTime.Time, node.ConfigSelectedAt(m.View))
	if t := m.Taint(); t != nil && t.TimeAdded != nil {
		last = timing.Latest(last, t.TimeAdded.Time)
	}
	if last.IsZero() {
		return m.Snapshot.Now
	}
	return last
}

// leadsOn reports whether an action brings a node further. An eviction may go on for long.
func leadsOn(a action.Action) bool {
	_, evicts := a.(action.Evict)
	return !evicts
}

// nodeStatus is what the controller reports about the node after it has reported have. The record is the last good
// state, and the desired state that failed.
func nodeStatus(m *member, have v1alpha1.GPUNodeStatus, record v1alpha1.RolloutStatus) v1alpha1.GPUNodeStatus {
	const most = 32 // of the schema
	ready, now := nodeReadyCondition(m), m.Snapshot.Now
	s := v1alpha1.GPUNodeStatus{ObservedGeneration: m.Node.GPU.Generation, Rollout: record}
	s.Conditions = condition.Set(have.Conditions, ready, now)
	problem := ready
	if problem.Status = metav1.ConditionFalse; hasEnded(m) || m.Unserved {
		problem.Status = metav1.ConditionTrue
	}
	s.Conditions = condition.SetProgress(s.Conditions, problem, now)
	sortConditions(s.Conditions)
	if m.ByClaims() {
		s.Rollout.Shares, _ = m.Node.Published.Shares()
	}
	if !m.HasStatus() {
		return s
	}
	s.Rollout.State = string(m.State)
	if m.Policy != nil {
		s.Rollout.PolicyName = m.Policy.Name
	}
	s.Rollout.Resources = resourceCounts([]*member{m}, mostOfANode)
	if m.State != node.UpToDate {
		s.Rollout.Steps = plannedChanges(m.View)
		blockers := blockerStatuses(m)
		s.Rollout.Blockers = blockers[:min(len(blockers), most)]
	}
	return s
}

// sortConditions puts the conditions into the order of ReportedStatus.
func sortConditions(conditions []metav1.Condition) {
	order := []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled}
	slices.SortFunc(conditions, func(a, b metav1.Condition) int {
		return cmp.Compare(slices.Index(order, a.Type), slices.Index(order, b.Type))
	})
}

// hasEnded reports whether nothing more happens to the node until the policy, the node or the cluster is changed.
func hasEnded(m *member) bool {
	return m.State == node.Failed && !m.HoldsSlot || m.State == node.Unsupported || node.ClassOf(m.Reason).Is(node.Ends)
}

// nodeReadyCondition is the condition Ready of the node: whether it advertises what is desired.
func nodeReadyCondition(m *member) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, ObservedGeneration: m.Node.GPU.Generation,
		Reason: m.Reason, Message: m.Message,
	}
	discovered, reported := condition.Find(m.Node.GPU.Status.Conditions, v1alpha1.ConditionDiscovered)
	switch {
	case m.Unserved:
		c.Reason, c.Message = m.Snapshot.Plugin.Reason, m.Snapshot.Plugin.Message
	case m.State != node.UpToDate:
	case m.Policy != nil:
		c.Status, c.Message = metav1.ConditionTrue, cmp.Or(c.Message, fmt.Sprintf("The node advertises what policy %s asks for", m.Policy.Name))
	case m.Node.GPU.Spec.Baseline != nil && !node.Retained(m.Node.GPU.Spec):
		if c.Reason == v1alpha1.ReasonReady {
			c.Reason, c.Message = v1alpha1.ReasonRestoring, "The node is in its baseline, which is being recorded"
		}
	case !reported:
		c.Status, c.Reason = metav1.ConditionUnknown, v1alpha1.ReasonAwaitingReport
		c.Message = "The agent has not reported the GPUs yet; if that lasts, look at the pod with app.kubernetes.io/name=gpu-sharing-agent on the node"
	case discovered.Status != metav1.ConditionTrue:
		c.Status, c.Reason, c.Message = discovered.Status, discovered.Reason, discovered.Message
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonNoPolicy, "No policy governs the node"
	}
	c.Message = cmp.Or(c.Message, "The controller gives no further reason")
	return c
}

// blockerStatuses are the blockers as the status lists them, in the order of View.Blockers.
func blockerStatuses(m *member) []v1alpha1.BlockerStatus {
	const length = 256 // of the schema
	list := make([]v1alpha1.BlockerStatus, 0, len(m.Blockers))
	for _, b := range m.Blockers {
		s := v1alpha1.BlockerStatus{Kind: v1alpha1.BlockerKindPod, DeviceUUID: b.UUID, Handling: format.Cut(node.HandlingOf(m.View, b), length)}
		switch p := m.PodOf(b); {
		case p != nil:
			s.Namespace, s.Name = p.Namespace, p.Name
		case b.Holder != nil:
			s.Namespace, s.Name = b.Holder.Namespace, b.Holder.Pod
		case b.Claim != "":
			s.Kind = v1alpha1.BlockerKindResourceClaim
			s.Namespace, s.Name, _ = strings.Cut(b.Claim, "/")
		default:
			s.Kind, s.Name, s.PID = v1alpha1.BlockerKindProcess, cmp.Or(b.Process.Name, "unknown"), int64(b.Process.PID)
		}
		if b.Holder != nil {
			s.ContainerName = b.Holder.Container
		}
		if b.Instance != gpu.WholeGPU {
			s.Instance = new(int32(b.Instance))
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b v1alpha1.BlockerStatus) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name),
			cmp.Compare(a.PID, b.PID), cmp.Compare(a.DeviceUUID, b.DeviceUUID), cmp.Compare(a.ContainerName, b.ContainerName),
			cmp.Compare(instanceID(a.Instance), instanceID(b.Instance)))
	})
	return slices.CompactFunc(list, func(a, b v1alpha1.BlockerStatus) bool { return equality.Semantic.DeepEqual(a, b) })
}

// instanceID is the id of an instance, or gpu.WholeGPU.
func instanceID(id *int32) int {
	if id == nil {
		return gpu.WholeGPU
	}
	return int(*id)
}
