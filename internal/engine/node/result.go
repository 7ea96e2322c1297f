// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Each gate makes a result. What follows when a gate is not passed in time is the same for all but draining, which
// rolls nothing back (drain.go):
//
//	gate → Result{state, reason, message, next: Act | PacedStep | nil} → next gate
//	     → not in time: failChange → recordFailure, and the last good state or the baseline | RecordTimeout
//
// A result only proposes its next step: rollout's budget and windows decide whether it is taken now.
//
//	record of a failure             written by                       ends
//	status.rollout.failed           recordFailure: a fallback        another policy generation, or a retry by annotation
//	AnnotationTimedOut              RecordTimeout: no fallback       at its time, twice as late each time (timedout.go)
//	AnnotationInterrupted           maintenance, users, lost agent   once the agent has answered again

// Result is the state of a node and what follows from it.
type Result struct {
	State
	Reason, Message string
	Next            NextStep
	After           time.Duration // when to look again; 0: no need
	// Rollback is how far a node with Failed is on its way back; empty: that has not begun, or nothing has to go back.
	Rollback State
}

// gateFunc is a gate that a change has to pass. It reports what the node waits for, and whether it waits.
type gateFunc func(*View) (Result, bool)

// Finding is something that is left half-done on a node, by the operator or by another controller.
type Finding struct {
	Reason, Message string          // empty: nothing, or not yet
	Beside          bool            // no change waits for it, so it is the reason of no node that is being changed
	Repair          []action.Action // what is ours to put right
	After           time.Duration   // when to look again; 0: no need
}

// underwayReason is the reason of a node on which nothing in particular is waited for.
func underwayReason(v *View) string {
	if v.Policy == nil {
		return v1alpha1.ReasonRestoring
	}
	return v1alpha1.ReasonProgressing
}

// failChange gives a desired state up: the node falls back. What has been reached before is not given up but waited
// for.
func failChange(v *View, r Result, reason, message string) Result {
	if _, is := UnderMaintenance(v); is || WasInterrupted(v) {
		r.Message = message
		return r // it is not the desired state that failed
	}
	r.State, r.Reason, r.Message = Failed, reason, message
	actions, _ := SplitStep(r.Next)
	switch {
	case hasFallback(v):
		actions = append(actions, recordFailure(v, reason, message)...)
	case v.Disturbed():
		actions = append(actions, RecordTimeout(v, reason, "the change did not end in time")...)
	case v.Desired == nil && !v.Managed():
		if again := v.Node.GPU.Spec.ChangeTime.Add(timing.Patience); again.After(v.Snapshot.Now) {
			r.After = again.Sub(v.Snapshot.Now)
			r.Message += fmt.Sprintf("; the operator tries again at %s if nobody uses the GPUs then", format.Clock(again))
		}
	}
	r.Next = atOnce(actions...)
	return r
}

// hasFallback reports whether the node falls back when the change fails. A release, a node that falls back already and
// one that reached its target before do not: they are waited for, and hold nobody up.
func hasFallback(v *View) bool { return v.Desired != nil && !v.FallsBack && !v.Reached() }

// RecordTimeout is RestoreScheduling for a change that did not end in time and has nothing to fall back to, with a
// record of that.
func RecordTimeout(v *View, reason, why string) []action.Action {
	if v.Managed() {
		return RestoreScheduling(v, why)
	}
	last, _ := lastTimeout(v)
	return giveBack(v, Timeout{Reason: reason, Times: last.Times + 1}, why)
}

// restoreSchedulingUnlessBusy is RestoreScheduling unless the agent is at work on an earlier desired state, which holds
// the node for good reason.
func restoreSchedulingUnlessBusy(v *View, why string) []action.Action {
	if BusyFor(v) > 0 {
		return nil
	}
	return RestoreScheduling(v, why)
}

// removeTaints takes our taint off the node and its devices, wherever it is.
func removeTaints(v *View) []action.Action {
	var actions []action.Action
	if slices.ContainsFunc(v.Node.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }) {
		actions = append(actions, action.Untaint{Node: v.Node.Name})
	}
	if !v.Node.DevicesTaintedAt.IsZero() {
		actions = append(actions, action.UntaintDevices{Node: v.Node.Name})
	}
	return actions
}

// RestoreScheduling takes back what holds a node though its GPUs are not being changed: our taint and our pauses.
func RestoreScheduling(v *View, why string) []action.Action {
	actions := removeTaints(v)
	if patch, resumes := resumeClients(v, why); resumes {
		actions = append(actions, patch)
	}
	return actions
}

// resumeClients is the patch that resumes NVIDIA's clients, if we paused any.
func resumeClients(v *View, why string) (patch action.PatchNode, resumes bool) {
	if patch, resumes = resumePatch(v); !resumes {
		return v.Patch(why), false
	}
	patch.Why = "resuming NVIDIA's GPU clients: " + why
	stampResumed(v, patch)
	return patch, true
}

// unschedulableSince is since when the node is kept from its users: the later of our taint and our pauses; zero if it
// is not.
func unschedulableSince(v *View) (since time.Time) {
	if t := v.Taint(); t != nil && t.TimeAdded != nil {
		since = t.TimeAdded.Time
	}
	if len(OwnPauses(v)) > 0 {
		since = timing.Latest(since, v.Node.HeldSince)
	}
	return since
}

// agentMessage adds to a message what the agent says of why it is not done.
func agentMessage(v *View, message string) string {
	for _, c := range v.Node.GPU.Status.Conditions {
		if c.Type == v1alpha1.ConditionApplied && c.Status != metav1.ConditionTrue && c.Message != "" &&
			c.ObservedGeneration == v.Node.GPU.Generation {
			return fmt.Sprintf("%s; the agent says %s: %s", message, c.Reason, c.Message)
		}
	}
	return message
}

// agentAwayMessage adds to a message that the agent is away for that reason.
func agentAwayMessage(why string) string {
	return why + "; the agent leaves the node meanwhile and returns by itself"
}

// untilOverdue has the node decided on again when its interrupted change is overdue.
func untilOverdue(v *View, r Result) Result {
	if at, was := InterruptedAt(v); was {
		r.After = timing.Sooner(r.After, at.Add(timing.MaintenanceTimeout).Sub(v.Snapshot.Now))
	}
	return r
}

// NextStep is what is done about a node after a result: an act, a PacedStep, or nil if nothing is done. Gates make one
// by atOnce or withSlot. What is left half-done on a node is repaired beside it, whatever comes next (Finding).
//
//sumtype:decl
type NextStep interface{ isNext() }

// Act waits for no slot in the budget: it goes on with a change that has begun, or restores what the operator took from
// the node.
type Act []action.Action

// PacedStep is the next step of a change. It needs a slot in the budget.
type PacedStep struct {
	// Start is the step itself; empty while the change waits.
	Start []action.Action
	// OnDenied is done instead of Start when the change may not go on: it leaves the node as if none had begun.
	OnDenied []action.Action
}

func (Act) isNext() {}

func (PacedStep) isNext() {}

// atOnce returns the act of those actions; nil if there are none.
func atOnce(actions ...action.Action) NextStep {
	if len(actions) == 0 {
		return nil
	}
	return Act(actions)
}

// withSlot returns the PacedStep of those actions; nil if there are none and the operator holds nothing on the node, or
// the agent is at work. Without actions the change waits, and is undone all the same if it may not go on.
func withSlot(v *View, actions ...action.Action) NextStep {
	restore := restoreSchedulingUnlessBusy(v, "the change is held back")
	if len(actions)+len(restore) == 0 {
		return nil
	}
	return PacedStep{Start: actions, OnDenied: restore}
}

// SplitStep returns what is done at once, and the step that needs a slot. At most one of them has actions.
func SplitStep(next NextStep) (Act, PacedStep) {
	switch next := next.(type) {
	case Act:
		return next, PacedStep{}
	case PacedStep:
		return nil, next
	case nil:
	}
	return nil, PacedStep{}
}

// overruledLeft is how long another controller is still left alone that sets a label again.
func overruledLeft(v *View, label string) time.Duration {
	for part := range strings.SplitSeq(v.Node.Annotations[v1alpha1.AnnotationOverruled], ",") {
		if at, did := timing.Stamped(part, label); did {
			return at.Add(timing.Patience).Sub(v.Snapshot.Now)
		}
	}
	return 0
}

// noteOverruled notes in a patch that the operator sets a label again which another controller had set.
func noteOverruled(v *View, patch action.PatchNode, label string) {
	noted := v.Node.Annotations[v1alpha1.AnnotationOverruled]
	if in, has := patch.Annotations[v1alpha1.AnnotationOverruled]; has && in != nil {
		noted = *in
	}
	parts := []string{timing.Stamp(label, v.Snapshot.Now)}
	for part := range strings.SplitSeq(noted, ",") {
		if part != "" && !strings.HasPrefix(part, label+"@") {
			parts = append(parts, part)
		}
	}
	slices.Sort(parts)
	patch.Annotations[v1alpha1.AnnotationOverruled] = new(strings.Join(parts, ","))
}

// triggerSyncs makes the kubelet project the ConfigMap into the pods that mount it and do not see the key yet, again
// and again: one that comes before the kubelet knows of the key is lost. left is when to look again.
func triggerSyncs(v *View) (syncs []action.Action, left time.Duration, unseen []string) {
	for _, p := range v.Node.Pods {
		if !p.MountsConfig || p.Terminating {
			continue
		}
		at, synced := timing.Stamped(p.SyncTriggered, v.Target.Config)
		age := v.Snapshot.Now.Sub(at)
		sees, watched := seesConfig(v, p)
		if sees || !watched && synced && age >= timing.VisibleAfter {
			continue
		}
		unseen = append(unseen, p.Namespace+"/"+p.Name)
		if !synced || age >= timing.VisibleAfter {
			syncs = append(syncs, action.TriggerSync{
				Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Value: timing.Stamp(v.Target.Config, v.Snapshot.Now),
			})
			age = 0
		}
		left = max(left, timing.VisibleAfter-age)
	}
	slices.Sort(unseen)
	return syncs, left, unseen
}

// seesConfig says whether a pod has the key before it as the agent reports it, and watched whether the agent will: it
// saw the pod's config-manager with another key, and has not been silent for too long.
func seesConfig(v *View, p cluster.Pod) (sees, watched bool) {
	config, since := v.Node.GPU.Status.Config, v.Node.GPU.Spec.ChangeTime
	listed := slices.Contains(config.PodUIDs, p.UID)
	if config.Name == v.Target.Config && config.ChangeTime.Equal(&since) {
		return listed, false
	}
	return false, listed && v.Snapshot.Now.Sub(since.Time) < timing.AgentSilent
}

// deletePod deletes a pod of the node.
func deletePod(v *View, p cluster.Pod, why string) action.DeletePod {
	return action.DeletePod{Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Why: why}
}

// DrainLeft is how much of the time for draining is left.
func DrainLeft(v *View) time.Duration {
	since := DrainingSince(v)
	if since.IsZero() {
		return v.DrainTimeout()
	}
	if c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired); found && OnlyRebootLeft(v) && !fromFuture(v, c.LastTransitionTime.Time) {
		since = timing.Latest(since, c.LastTransitionTime.Time) // only then the other GPUs have to be idle too
	}
	return since.Add(v.DrainTimeout()).Sub(v.Snapshot.Now)
}

// DrainingSince is when the time for draining began; zero if it has not, or if that is not recorded.
func DrainingSince(v *View) time.Time {
	switch t := v.Taint(); {
	case t != nil && t.TimeAdded != nil:
		return t.TimeAdded.Time
	case t == nil && MustStayUntainted(v) && len(OwnPauses(v)) > 0:
		return v.Node.HeldSince
	}
	return time.Time{}
}
