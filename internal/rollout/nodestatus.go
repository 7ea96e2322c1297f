// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// The controller reports on each node in the status of its GPUNode, beside what the agent reports there. To report each step of each
// node would cost more writes than the change itself, so a report is due
//
//	at the end     the node is ready, has failed or is unsupported
//	while it waits for pods, the budget, a window, an agent: once, and again when the reason or the blockers change
//	while it is at work  at the begin of a change that disrupts the node, and where a step takes longer than a report is worth
//
// Until then the last report is about an older generation or an earlier moment: observedGeneration tells that.

// reportAt is how long a step of a change takes before it is reported.
const reportAt = 30 * time.Second

// reports returns the report that is due about the node, and takes from the actions what it records.
func (m *member) reports() (Report, bool) {
	report := Report{Node: m.node.Name, Policy: m.ref()}
	records := false
	m.actions = slices.DeleteFunc(slices.Clone(m.actions), func(a Action) bool {
		r, is := a.(Report)
		if is {
			report, records = r, true
		}
		return is
	})
	if !records {
		report.Status.Rollout.LastGood, report.Status.Rollout.Failed = m.lasting()
	}
	have := Reported(m.node.GPU.Status)
	if !records && (m.goesOn(have) || m.unseen(have)) {
		return report, false
	}
	if f := report.Status.Rollout.Failed; records && f != nil {
		m.reason, m.message = f.Reason, f.Message
	}
	report.Status = m.nodeStatus(have, report.Status.Rollout)
	if !records {
		report.Why = "reporting " + m.readyOf().Reason
	}
	_, maintained := m.maintenance()
	report.Stuck = m.by == nil && m.listed() && (maintained || m.stands())
	return report, !equality.Semantic.DeepEqual(have, report.Status)
}

// hasNews reports whether a report is due about a node of which nothing else is to be done.
func (m *member) hasNews() bool {
	_, news := m.reports()
	return news
}

// Reported returns what the controller has reported in the status of a GPUNode.
func Reported(s v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus {
	reported := v1alpha1.GPUNodeStatus{ObservedGeneration: s.ObservedGeneration, Rollout: s.Rollout}
	for _, conditionType := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled} {
		if c, found := condition.Find(s.Conditions, conditionType); found {
			reported.Conditions = append(reported.Conditions, c)
		}
	}
	return reported
}

// unseen reports whether nothing is known of a node yet, and the defaults of the API report just that.
func (m *member) unseen(have v1alpha1.GPUNodeStatus) bool {
	return have.ObservedGeneration == 0 && m.readyOf().Reason == v1alpha1.ReasonAwaitingReport
}

// lasting returns the part of the status that outlasts a report: the last good state, and the desired state that failed as long as it
// counts.
func (m *member) lasting() (*v1alpha1.NodeSharing, *v1alpha1.FailedChange) {
	last := m.node.GPU.Status.Rollout
	if m.node.GPU.Spec.Baseline == nil {
		return nil, nil
	}
	if f := last.Failed; f != nil && (m.superseded(*f) || (m.by == nil || m.wish != nil) && !m.fallsBack && m.asks()) {
		return last.LastGood, nil
	}
	return last.LastGood, last.Failed
}

// goesOn reports whether the node is at work and was reported well enough: it makes its next step now, or its last step was a moment ago.
// A node that is kept from its users is not reported as ready meanwhile.
func (m *member) goesOn(have v1alpha1.GPUNodeStatus) bool {
	if _, reported := condition.Find(have.Conditions, v1alpha1.ConditionReady); !reported {
		return false // kstatus takes a GPUNode without conditions for one that is done
	}
	if slices.ContainsFunc(m.actions, leadsOn) {
		return true // and is reported in the next pass, if it has come no further then
	}
	if !underway(m.reason) {
		return false
	}
	last := latest(m.node.GPU.Spec.ChangeTime.Time, m.selectedAt())
	if t := m.taint(); t != nil && t.TimeAdded != nil {
		last = latest(last, t.TimeAdded.Time)
	}
	left := last.Add(reportAt).Sub(m.world.Now)
	if left <= 0 || m.disturbed() && condition.IsTrue(have.Conditions, v1alpha1.ConditionReady) {
		return false
	}
	m.after = Sooner(m.after, left)
	return true
}

// underway reports whether a node with that reason is being changed, as opposed to one that waits for its turn or is blocked.
func underway(reason string) bool {
	switch reason {
	case v1alpha1.ReasonProgressing, v1alpha1.ReasonPausingClients, v1alpha1.ReasonDisablingNVIDIAMPS, v1alpha1.ReasonApplying,
		v1alpha1.ReasonRebooting, v1alpha1.ReasonMIGManagerPartitioning, v1alpha1.ReasonSelecting, v1alpha1.ReasonVerifying,
		v1alpha1.ReasonRestoring:
		return true
	}
	return false
}

// leadsOn reports whether an action brings a node further. An eviction may go on for long.
func leadsOn(a Action) bool {
	_, evicts := a.(Evict)
	return !evicts
}

// stands reports whether the GPUs of the node are not being changed yet, or no longer.
func (m *member) stands() bool {
	return slices.Contains([]State{
		StateFailed, StateImpossible, StateUndiscovered, StateStaleDisruptive, StateDraining, StateQuiescing,
	}, m.State)
}

// nodeStatus is what the controller reports about the node after it has reported have. The record is the last good state, and the
// desired state that failed.
func (m *member) nodeStatus(have v1alpha1.GPUNodeStatus, record v1alpha1.RolloutStatus) v1alpha1.GPUNodeStatus {
	const most = 32 // of the schema
	ready, now := m.readyOf(), m.world.Now
	s := v1alpha1.GPUNodeStatus{ObservedGeneration: m.node.GPU.Generation, Rollout: record}
	s.Conditions = condition.Set(have.Conditions, ready, now)
	problem := ready
	if problem.Status = metav1.ConditionFalse; m.ended() || m.unserved {
		problem.Status = metav1.ConditionTrue
	}
	s.Conditions = condition.SetProgress(s.Conditions, problem, now)
	sortConditions(s.Conditions)
	if !m.listed() {
		return s
	}
	s.Rollout.State = string(m.State)
	if m.by != nil {
		s.Rollout.PolicyName = m.by.Name
	}
	s.Rollout.Resources = resources([]*member{m}, mostOfANode)
	if m.State != StateUpToDate {
		s.Rollout.Steps = m.planned()
		blockers := m.blockerStatuses()
		s.Rollout.Blockers = blockers[:min(len(blockers), most)]
	}
	return s
}

// sortConditions puts the conditions into the order of Reported.
func sortConditions(conditions []metav1.Condition) {
	order := []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled}
	slices.SortFunc(conditions, func(a, b metav1.Condition) int {
		return cmp.Compare(slices.Index(order, a.Type), slices.Index(order, b.Type))
	})
}

// ended reports whether nothing more happens to the node until the policy, the node or the cluster is changed.
func (m *member) ended() bool {
	return m.State == StateFailed && !m.holds || m.State == StateImpossible || m.reason == v1alpha1.ReasonRolloutHalted ||
		m.reason == v1alpha1.ReasonInvalidWindow
}

// readyOf is the condition Ready of the node: whether it advertises what is desired.
func (m *member) readyOf() metav1.Condition {
	const length = 2048
	c := metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, ObservedGeneration: m.node.GPU.Generation,
		Reason: m.reason, Message: cut(m.message, length),
	}
	discovered, reported := condition.Find(m.node.GPU.Status.Conditions, v1alpha1.ConditionDiscovered)
	switch {
	case m.unserved:
		c.Reason, c.Message = m.world.Wiring.Reason, cut(m.world.Wiring.Message, length)
	case m.State != StateUpToDate:
	case m.by != nil:
		c.Status, c.Message = metav1.ConditionTrue, cmp.Or(c.Message, fmt.Sprintf("The node advertises what policy %s asks for", m.by.Name))
	case m.node.GPU.Spec.Baseline != nil && !retained(m.node.GPU.Spec):
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

// blockerStatuses are the blockers as the status lists them, in the order of users.
func (m *member) blockerStatuses() []v1alpha1.BlockerStatus {
	const length = 256 // of the schema
	list := make([]v1alpha1.BlockerStatus, 0, len(m.blockers))
	for _, b := range m.blockers {
		s := v1alpha1.BlockerStatus{Kind: v1alpha1.BlockerKindPod, DeviceUUID: b.UUID, Handling: cut(m.fateOf(b), length)}
		switch p := m.podOf(b); {
		case p != nil:
			s.Namespace, s.Name = p.Namespace, p.Name
		case b.Holder != nil:
			s.Namespace, s.Name = b.Holder.Namespace, b.Holder.Pod
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
