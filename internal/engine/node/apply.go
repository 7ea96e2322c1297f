// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// setGently changes the spec of a node on which nothing has to be idle.
func setGently(v *View) Result {
	j := Result{
		State: PendingNonDisruptive, Reason: underwayReason(v),
		Message: "the node is not in the desired state yet; the change disturbs nothing that runs",
	}
	if fence, pending := disableMIGManager(v); pending {
		if _, step := SplitStep(fence.Next); len(step.Start) > 0 {
			fence.State = j.State
		}
		return fence
	}
	if g, pending := prepareForMPS(v, j.State); pending {
		return g
	}
	if patch, unsaved := baselineUnsaved(v); unsaved {
		j.Next = withSlot(v, patch)
		return j
	}
	j.Next = withSlot(v, requestTarget(v))
	return j
}

// applying waits for the agent.
func applying(v *View) Result {
	j := Result{State: Applying, Reason: v1alpha1.ReasonApplying, Message: agentMessage(v, "the agent is changing the GPUs")}
	if reason, message, is := v.Stalled(); is {
		return failChange(v, j, reason, message)
	}
	if patch, found := recordFoundIntervals(v); found {
		j.Next = withSlot(v, patch)
		return j
	}
	if v.Node.BaselineLost {
		j.Next = withSlot(v, recordBaseline(v))
		return j
	}
	late := v1alpha1.ReasonApplyTimedOut
	help, waits := waitsForReboot(v)
	switch {
	case waits:
		j.Reason, late = v1alpha1.ReasonRebootRequired, v1alpha1.ReasonRebootRequired
		j.Message += help
	case rebootPermitted(v):
		j.Reason = v1alpha1.ReasonRebooting
	}
	left, timeout, limited := timeLeft(v)
	if !limited {
		return j
	}
	if left <= 0 {
		return failChange(v, j, late, agentMessage(v, fmt.Sprintf("the GPUs did not match the desired state within %s", timeout))+help)
	}
	j.Next, j.After = atOnce(syncAhead(v)...), left
	return j
}

// timeLeft returns how much is left of the time that the agent has for what it was asked, and how long that is. It is
// not limited for what was reached before, which is waited for, unless the node is kept from its users meanwhile. What
// was asked for before that counts from then on.
func timeLeft(v *View) (left, timeout time.Duration, limited bool) {
	since := v.Node.GPU.Spec.ChangeTime.Time
	if since.IsZero() || v.Reached() && !v.Disturbed() {
		return 0, 0, false
	}
	if v.Reached() || v.FallsBack {
		since = timing.Latest(since, unschedulableSince(v))
	}
	timeout = timing.ApplyTimeout
	if _, waits := waitsForReboot(v); !waits && rebootPermitted(v) {
		timeout = timing.RebootTimeout
	}
	return since.Add(timeout).Sub(v.Snapshot.Now), timeout, true
}

// gaveUp reports whether the release of the node failed, and its scheduling was restored. There is no other state to go
// back to. To drain it once more at once, and to pause NVIDIA's clients, would disturb the node again and again.
func gaveUp(v *View) bool {
	if v.Policy != nil || v.Taint() != nil || !v.Disruptive() {
		return false
	}
	if len(v.Blockers) > 0 && v.DrainMode() == v1alpha1.DrainModeNever {
		return false // it is left to those who use it, and neither drained nor paused
	}
	left, _, limited := timeLeft(v)
	_, _, stalled := v.Stalled()
	return stalled || limited && left <= 0
}

// resting leaves a node to its users for a while, because a change with nothing to fall back to did not end in time.
func resting(v *View, t Timeout) Result {
	j := Result{State: Failed, Reason: t.Reason}
	j.Next = atOnce(RestoreScheduling(v, "the change did not end in time")...)
	j.Message = fmt.Sprintf("The change did not end in time. At %s the operator removed its taint and resumed NVIDIA's programs",
		format.Clock(t.At))
	if pods := podsNotEnding(v); len(pods) > 0 {
		j.Message += "; these pods of NVIDIA's do not end: " + format.List(pods)
	}
	j.Message = agentMessage(v, j.Message)
	if _, reboot := waitsForReboot(v); reboot {
		j.Message += ". A GPU takes its MIG mode only at a reboot. Reboot the node"
		return j
	}
	left := t.Until().Sub(v.Snapshot.Now)
	if j.After = max(left, 0); left <= 0 {
		j.Message += "; the operator tries again when nobody uses what must be changed: " + describeBlockers(v)
		return j
	}
	j.Message += fmt.Sprintf("; the operator tries again at %s", format.Clock(t.Until()))
	if v.Policy == nil {
		j.Message += " if nobody uses the GPUs then"
	}
	return j
}

// rebooting lets the agent reboot a node that nobody uses, then waits for it.
func rebooting(v *View, j Result) Result {
	if rebootPermitted(v) {
		return applying(v)
	}
	j.State, j.Reason = Idle, v1alpha1.ReasonRebooting
	j.Message = "a MIG mode changes only at a reboot; nobody uses a GPU of the node, and it is going to be rebooted"
	j.Next = withSlot(v, permitReboot(v))
	return j
}
