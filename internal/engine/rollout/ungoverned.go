// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// ungoverned is a node that no policy governs, or can, and that stays as it is, if only for now. The result released
// says that the GPUNode records how a policy releases the node, or that there is nothing to record.
func ungoverned(
	s *cluster.Snapshot, n *cluster.Node, selected, governed policy.Governed, unserved bool,
) (m member, released, is bool) {
	if governed.By != nil {
		return m, false, false
	}
	v := node.NewView(s, n)
	until, may := policiesReturn(v)
	if unserved || node.Retained(n.GPU.Spec) && (!may || n.GPU.Spec.Numbering == nil) { // by its numbering a policy that returns names the same GPUs
		return staying(v, selected), node.ReleaseRecorded(n, selected.By), true
	}
	if may {
		m = awaiting(v, until)
	}
	return m, may, may
}

// staying is a node that no policy governs, or can, and that stays as it is.
func staying(v *node.View, selected policy.Governed) member {
	m := member{View: v}
	m.Result, m.Actions = node.Result{State: node.UpToDate, Reason: v1alpha1.ReasonReady}, retain(&m)
	if selected.By == nil && !node.Retained(v.Node.GPU.Spec) { // no status of a policy reports why it is not restored
		m.State, m.Reason, m.Message = node.Unsupported, v.Snapshot.Plugin.Reason, v.Snapshot.Plugin.Message
	}
	m.Unserved = selected.By != nil && m.NoPlugin()
	m.Slot = slotOf(&m)
	return m
}

// policiesReturn reports whether a GPUNode was made anew or restored from a backup, and until when its policy may still
// follow: no policy has reached its aim under it, and it is younger than what was done to its node, or it has lost the
// baseline and the agent was asked under another one. A policy that is absent meanwhile was not deleted. One that failed
// before it asked for anything was. What was said stays said: a time that a clock which was ahead has stamped counts as
// long past only until it is there.
func policiesReturn(v *node.View) (until time.Time, may bool) {
	n, spec, created := v.Node, &v.Node.GPU.Spec, v.Node.GPU.CreationTimestamp.Time
	until = created.Add(timing.PoliciesReturn)
	if spec.Baseline == nil || n.GPU.Status.Rollout.LastGood != nil || !until.After(v.Snapshot.Now) {
		return until, false
	}
	said, _ := condition.Find(n.GPU.Status.Conditions, v1alpha1.ConditionReady) // of a node without a baseline that is True
	_, selected, _ := timing.Parse(n.Annotations[v1alpha1.AnnotationSelected])
	unsaid := slices.Contains([]string{v1alpha1.ReasonAwaitingReport, v1alpha1.ReasonNoPolicy}, said.Reason) && (!selected.After(created) || isAhead(v, selected))
	older := func(at time.Time) bool { return isOlder(v, at, unsaid) }
	younger := older(selected) || older(spec.ChangeTime.Time) || said.Status == metav1.ConditionFalse && said.Reason == v1alpha1.ReasonNoPolicy
	unwritten := n.GPU.Generation <= 1 // else the node was forgotten, and its copy of the baseline goes next
	return until, younger || unwritten && spec.ChangeTime.IsZero() && n.BaselineLost && !node.AgentNeverRequested(v)
}

// isOlder reports whether a record is older than the GPUNode. One of the future tells nothing of one of which more was said,
// or that has selected since.
func isOlder(v *node.View, at time.Time, unsaid bool) bool {
	if isAhead(v, at) {
		return unsaid
	}
	return !at.IsZero() && at.Add(timing.ClocksDiffer).Before(v.Node.GPU.CreationTimestamp.Time)
}

// isAhead reports whether a clock that was ahead has stamped a time. One that was far ahead is long past (WithoutFuture).
func isAhead(v *node.View, at time.Time) bool { return at.Unix() == 0 || at.After(v.Snapshot.Now) }

// awaiting is a node that is left as it is until its policy is back, or until then.
func awaiting(v *node.View, until time.Time) member {
	m := member{View: v}
	m.Result = node.Result{
		State: node.UpToDate, Reason: v1alpha1.ReasonNoPolicy, After: until.Sub(v.Snapshot.Now),
		Message: "The GPUNode was made anew, or an object of the node restored from a backup, and no policy governs the node yet; without one the node is released at " + format.Clock(until),
	}
	m.Actions = append(node.RestoreScheduling(v, "no policy governs the node"), node.AskNothingOfUsers(v)...)
	m.Slot = slotOf(&m)
	return m
}

// awaitFormer leaves a node as it is to which another policy comes first than the one that it was changed for: who creates
// policies again does it one after the other.
func awaitFormer(m *member) {
	former := cmp.Or(m.Node.ChangedFor, m.Node.GPU.Spec.PolicyName)
	isFormer := func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == former }
	until, may := policiesReturn(m.View)
	if !may || m.Policy == nil || former == "" || slices.ContainsFunc(m.Snapshot.Policies, isFormer) {
		return
	}
	*m = awaiting(m.View, until)
	m.State, m.Message = node.PendingDisruptive, "Waiting for policy "+former+" until "+format.Clock(until)+
		": the node was changed for it before its GPUNode was made anew or restored from a backup"
}

// retain leaves a node as it is, without holding it.
func retain(m *member) []action.Action {
	actions := node.RestoreScheduling(m.View, "no policy governs the node")
	if m.Node.GPU.Spec.Baseline == nil && node.MPSLabelOverridden(m.View) {
		actions = append(actions, node.AllowNVIDIAMPS(m.View, true)...)
	}
	actions = append(append(actions, forgetRecords(m)...), node.LeaveLostConfig(m.View)...)
	spec := m.Node.GPU.Spec
	switch {
	case m.NoPlugin():
		return append(actions, node.AskNothingOfUsers(m.View)...)
	case spec.PolicyName != "":
		spec = *spec.DeepCopy()
		spec.PolicyName, spec.Strategy, spec.Memory, spec.MemoryOwner, spec.OnDemand = "", "", nil, "", ""
		if node.AsksOfUsers(m.View) { // they come to the node again
			spec.ConfigName, spec.Devices = "", nil
		}
		if spec.Numbering = nil; spec.Baseline == nil {
			spec = v1alpha1.GPUNodeSpec{}
		} else {
			actions = append(actions, keepCopy(m, spec)...)
		}
		return append(actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Why: "leaving the node as it is"})
	}
	actions = append(actions, keepBaseline(m)...)
	if patch, stamped := node.ForgetManager(m.View); stamped && spec.Baseline == nil {
		actions = append(actions, patch)
	}
	return actions
}

// forgetRecords removes what is recorded of a change that did not end in time, and where nothing is left to restore also
// of one that was interrupted, of restarts that a release did not wait for, and a copy of the baseline that cannot be read.
func forgetRecords(m *member) []action.Action {
	records := []string{v1alpha1.AnnotationTimedOut}
	if m.Node.GPU.Spec.Baseline == nil {
		records = append(records, v1alpha1.AnnotationInstances, v1alpha1.AnnotationRestarted, v1alpha1.AnnotationInterrupted, v1alpha1.AnnotationBaseline)
	}
	patch := m.Patch("forgetting a change that did not end in time")
	for _, name := range records {
		if _, has := m.Node.Annotations[name]; has {
			patch.Annotations[name] = nil
		}
	}
	if len(patch.Annotations) == 0 {
		return nil
	}
	return []action.Action{patch}
}

// keepBaseline writes again what either object has lost of the baseline of a node that stays as it is.
func keepBaseline(m *member) []action.Action {
	spec := m.Node.GPU.Spec
	if spec.Baseline == nil {
		return nil
	}
	actions := keepCopy(m, spec)
	if m.Node.BaselineLost {
		actions = append(actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Why: "recording the baseline"})
	}
	return actions
}

// keepCopy writes a copy of the baseline that is lost, or has indexes: where the GPUNode is lost, they say that a policy
// governs the node.
func keepCopy(m *member, spec v1alpha1.GPUNodeSpec) []action.Action {
	if _, has := m.Node.Annotations[v1alpha1.AnnotationBaseline]; has && !m.Node.CopyNumbers {
		return nil
	}
	patch := m.Patch("recording the baseline")
	patch.Annotations[v1alpha1.AnnotationBaseline] = new(cluster.CopyOf(spec))
	return []action.Action{patch}
}
