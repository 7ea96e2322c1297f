// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/clients"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Judgement is the state of a node and what follows from it.
type Judgement struct {
	state.State
	Reason, Message string
	Next            Next
	After           time.Duration // when to look again; 0: no need
	// Rollback is how far a node with Failed is on its way back; empty: that has not begun.
	Rollback state.State
}

// Func is a gate that a change has to pass. It reports what the node waits for, and whether it waits.
type Func func(*view.View) (Judgement, bool)

// Finding is something that is left half-done on a node, by the operator or by another controller.
type Finding struct {
	Reason, Message string          // empty: nothing, or not yet
	Beside          bool            // no change waits for it, so it is the reason of no node that is being changed
	Repair          []action.Action // what is ours to put right
	After           time.Duration   // when to look again; 0: no need
}

// Underway is the reason of a node on which nothing in particular is waited for.
func Underway(v *view.View) string {
	if v.Policy == nil {
		return v1alpha1.ReasonRestoring
	}
	return v1alpha1.ReasonProgressing
}

// Fail gives a desired state up: the node falls back. What has been reached before is not given up but waited for.
func Fail(v *view.View, j Judgement, reason, message string) Judgement {
	if _, is := view.UnderMaintenance(v); is || view.WasInterrupted(v) {
		j.Message = message
		return j // it is not the desired state that failed
	}
	j.State, j.Reason, j.Message = state.Failed, reason, message
	actions, _ := Split(j.Next)
	switch {
	case HasFallback(v):
		actions = append(actions, desired.RecordFailure(v, reason, message)...)
	case v.Disturbed():
		actions = append(actions, TimeOut(v, reason, "the change did not end in time")...)
	case v.Desired == nil && !v.Managed():
		if again := v.Node.GPU.Spec.ChangeTime.Add(timing.Patience); again.After(v.World.Now) {
			j.After = again.Sub(v.World.Now)
			j.Message += fmt.Sprintf("; the operator tries again at %s if nobody uses the GPUs then", format.Clock(again))
		}
	}
	j.Next = AtOnce(actions...)
	return j
}

// HasFallback reports whether the node falls back when the change fails. A release, a node that falls back already and
// one that reached its target before do not: they are waited for, and hold nobody up.
func HasFallback(v *view.View) bool { return v.Desired != nil && !v.FallsBack && !v.Reached() }

// TimeOut is LetGo for a change that did not end in time and has nothing to fall back to. It records that in the write
// that resumes NVIDIA's programs, which comes first: a node without our taint and without the record would be tainted
// again at once.
func TimeOut(v *view.View, reason, why string) []action.Action {
	if v.Managed() {
		return LetGo(v, why)
	}
	patch, _ := resume(v, why)
	patch.Annotations[v1alpha1.AnnotationTimedOut] = new(view.NextTimeout(v, reason))
	return append([]action.Action{patch}, Untaint(v)...)
}

// GiveBack is LetGo unless the agent is at work on an earlier desired state, which holds the node for good reason.
func GiveBack(v *view.View, why string) []action.Action {
	if view.Busy(v) {
		return nil
	}
	return LetGo(v, why)
}

// Untaint takes our taint off the node and its devices, wherever it is.
func Untaint(v *view.View) []action.Action {
	var actions []action.Action
	if slices.ContainsFunc(v.Node.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }) {
		actions = append(actions, action.Untaint{Node: v.Node.Name})
	}
	if !v.Node.Ruled.IsZero() {
		actions = append(actions, action.UntaintDevices{Node: v.Node.Name})
	}
	return actions
}

// LetGo takes back what holds a node though its GPUs are not being changed: our taint and our pauses.
func LetGo(v *view.View, why string) []action.Action {
	actions := Untaint(v)
	if patch, resumes := resume(v, why); resumes {
		actions = append(actions, patch)
	}
	return actions
}

// resume is the patch that resumes NVIDIA's clients, if we paused any.
func resume(v *view.View, why string) (patch action.PatchNode, resumes bool) {
	if patch, resumes = clients.Resume(v); !resumes {
		return v.Patch(why), false
	}
	patch.Why = "resuming NVIDIA's GPU clients: " + why
	clients.StampResumed(v, patch)
	return patch, true
}

// TakenSince is since when the node is kept from its users: the later of our taint and our pauses; zero if it is not.
func TakenSince(v *view.View) (since time.Time) {
	if t := v.Taint(); t != nil && t.TimeAdded != nil {
		since = t.TimeAdded.Time
	}
	if len(view.Ours(v)) > 0 {
		since = timing.Latest(since, v.Node.HeldSince)
	}
	return since
}

// AgentMessage adds to a message what the agent says of why it is not done.
func AgentMessage(v *view.View, message string) string {
	for _, c := range v.Node.GPU.Status.Conditions {
		if c.Type == v1alpha1.ConditionApplied && c.Status != metav1.ConditionTrue && c.Message != "" &&
			c.ObservedGeneration == v.Node.GPU.Generation {
			return fmt.Sprintf("%s; the agent says %s: %s", message, c.Reason, c.Message)
		}
	}
	return message
}

// AgentAway adds to a message that the agent is away for that reason.
func AgentAway(why string) string {
	return why + "; the agent leaves the node meanwhile and returns by itself"
}

// UntilOverdue has the node decided on again when its interrupted change is overdue.
func UntilOverdue(v *view.View, j Judgement) Judgement {
	if at, was := view.InterruptedAt(v); was {
		j.After = timing.Sooner(j.After, at.Add(timing.MaintenanceTimeout).Sub(v.World.Now))
	}
	return j
}
