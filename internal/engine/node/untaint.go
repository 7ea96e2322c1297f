// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// awaitUntainted removes our taint.
func awaitUntainted(v *View) (Result, bool) {
	return Result{
		State: Finishing, Reason: v1alpha1.ReasonProgressing, Message: "done; the taint of the operator is being removed",
		Next: atOnce(removeTaints(v)...),
	}, v.Taint() != nil
}

// changeDone removes our taint and records what was reached.
func changeDone(v *View) Result {
	if r, is := awaitUntainted(v); is {
		return r // what was reached is recorded after that, together with Ready
	}
	if r, is := awaitLimited(v); is {
		return r
	}
	r := Result{State: UpToDate, Reason: v1alpha1.ReasonReady}
	if v.Target.ReleasesNode && MPSLabelOverridden(v) {
		return allowingNVIDIAMPS(v, r)
	}
	r.Next = atOnce(recordReached(v)...)
	return r
}

// removeTaints takes the taint of a change off the node and its devices, wherever it is.
func removeTaints(v *View) []action.Action {
	var actions []action.Action
	if v.Node.HasChangingTaint() {
		actions = append(actions, action.Untaint{Node: v.Node.Name})
	}
	if !v.Node.DevicesTaintedAt.IsZero() {
		actions = append(actions, action.UntaintDevices{Node: v.Node.Name})
	}
	return actions
}

// RestoreScheduling takes back what makes a node unavailable though its GPUs are not being changed: our taint, and
// operands that we stopped.
func RestoreScheduling(v *View, why string) []action.Action {
	actions := removeTaints(v)
	if patch, starts := startOperands(v, why); starts {
		actions = append(actions, patch)
	}
	return actions
}

// restoreSchedulingUnlessBusy is RestoreScheduling unless the agent is at work on an earlier desired state, which holds
// the node for good reason.
func restoreSchedulingUnlessBusy(v *View, why string) []action.Action {
	if BusyFor(v) > 0 {
		return nil
	}
	return RestoreScheduling(v, why)
}

// startOperands is the patch that starts NVIDIA's operands again, if we stopped any.
func startOperands(v *View, why string) (patch action.PatchNode, starts bool) {
	if patch, starts = startPatch(v); !starts {
		return v.Patch(why), false
	}
	patch.Why = "starting NVIDIA's operands again: " + why
	stampResumed(v, patch)
	return patch, true
}

// unavailableSince is since when the node is kept from its users: the later of our taint and our stopping of operands; zero if it
// is not.
func unavailableSince(v *View) (since time.Time) {
	if t := v.Taint(); t != nil && t.TimeAdded != nil {
		since = t.TimeAdded.Time
	}
	if len(StoppedByOperator(v)) > 0 {
		since = timing.Latest(since, v.Node.MarkedAtWorkSince)
	}
	return since
}
