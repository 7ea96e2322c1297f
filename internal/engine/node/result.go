// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Each gate makes a result, and what a gate does that is not passed in time is the same for all.
//
//	gate → Result{state, reason, message, next: act | PacedStep | nothing} → next gate | RestoreScheduling | failChange → last good
//	state, or RecordTimeout

// Result is the state of a node and what follows from it.
type Result struct {
	State
	Reason, Message string
	Next            nextStep
	After           time.Duration // when to look again; 0: no need
	// Rollback is how far a node with Failed is on its way back; empty: that has not begun.
	Rollback State
}

// gateFunc is a gate that a change has to pass. It reports what the node waits for, and whether it waits.
type gateFunc func(*View) (Result, bool)

// finding is something that is left half-done on a node, by the operator or by another controller.
type finding struct {
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

// failChange gives a desired state up: the node falls back. What has been reached before is not given up but waited for.
func failChange(v *View, j Result, reason, message string) Result {
	if _, is := UnderMaintenance(v); is || WasInterrupted(v) {
		j.Message = message
		return j // it is not the desired state that failed
	}
	j.State, j.Reason, j.Message = Failed, reason, message
	actions, _ := SplitStep(j.Next)
	switch {
	case hasFallback(v):
		actions = append(actions, recordFailure(v, reason, message)...)
	case v.Disturbed():
		actions = append(actions, RecordTimeout(v, reason, "the change did not end in time")...)
	case v.Desired == nil && !v.Managed():
		if again := v.Node.GPU.Spec.ChangeTime.Add(timing.Patience); again.After(v.Snapshot.Now) {
			j.After = again.Sub(v.Snapshot.Now)
			j.Message += fmt.Sprintf("; the operator tries again at %s if nobody uses the GPUs then", format.Clock(again))
		}
	}
	j.Next = atOnce(actions...)
	return j
}

// hasFallback reports whether the node falls back when the change fails. A release, a node that falls back already and
// one that reached its target before do not: they are waited for, and hold nobody up.
func hasFallback(v *View) bool { return v.Desired != nil && !v.FallsBack && !v.Reached() }

// RecordTimeout is RestoreScheduling for a change that did not end in time and has nothing to fall back to. It records that in the write
// that resumes NVIDIA's programs, which comes first: a node without our taint and without the record would be tainted
// again at once.
func RecordTimeout(v *View, reason, why string) []action.Action {
	if v.Managed() {
		return RestoreScheduling(v, why)
	}
	patch, _ := resumeClients(v, why)
	patch.Annotations[v1alpha1.AnnotationTimedOut] = new(nextTimeout(v, reason))
	return append([]action.Action{patch}, removeTaints(v)...)
}

// restoreSchedulingUnlessBusy is RestoreScheduling unless the agent is at work on an earlier desired state, which holds the node for good reason.
func restoreSchedulingUnlessBusy(v *View, why string) []action.Action {
	if agentBusy(v) {
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

// unschedulableSince is since when the node is kept from its users: the later of our taint and our pauses; zero if it is not.
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
func untilOverdue(v *View, j Result) Result {
	if at, was := InterruptedAt(v); was {
		j.After = timing.Sooner(j.After, at.Add(timing.MaintenanceTimeout).Sub(v.Snapshot.Now))
	}
	return j
}
