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

// setNonDisruptively changes the spec of a node on which nothing has to be idle.
func setNonDisruptively(v *View) Result {
	r := Result{
		State: PendingNonDisruptive, Reason: underwayReason(v),
		Message: "the node is not in the desired state yet; the change disturbs nothing that runs",
	}
	if disabling, pending := awaitMIGManagerDisabled(v); pending {
		if _, step := SplitStep(disabling.Next); len(step.Start) > 0 {
			disabling.State = r.State
		}
		return disabling
	}
	if r, pending := prepareForMPS(v, r.State); pending {
		return r
	}
	if patch, unsaved := baselineUnsaved(v); unsaved {
		r.Next = withSlot(v, patch)
		return r
	}
	r.Next = withSlot(v, requestTarget(v))
	return r
}

// applying waits for the agent.
func applying(v *View) Result {
	r := Result{State: Applying, Reason: v1alpha1.ReasonApplying, Message: agentMessage(v, "the agent is changing the GPUs")}
	if reason, message, is := v.Stalled(); is {
		return failChange(v, r, reason, message)
	}
	if patch, found := recordFoundIntervals(v); found {
		r.Next = withSlot(v, patch)
		return r
	}
	if v.Node.BaselineLost {
		r.Next = withSlot(v, recordBaseline(v))
		return r
	}
	late := v1alpha1.ReasonApplyTimedOut
	help, waits := whyNotRebooted(v)
	switch {
	case waits:
		r.Reason, late = v1alpha1.ReasonRebootRequired, v1alpha1.ReasonRebootRequired
		r.Message += help
	case rebootPermitted(v):
		r.Reason = v1alpha1.ReasonRebooting
	}
	left, timeout, limited := timeLeft(v)
	if !limited {
		return r
	}
	if left <= 0 {
		return failChange(v, r, late, agentMessage(v, fmt.Sprintf("the GPUs did not match the desired state within %s", timeout))+help)
	}
	r.Next, r.After = atOnce(syncAhead(v)...), left
	return r
}

// timeLeft returns how much is left of the time that the agent has for what it was asked, and how long that is. It is
// not limited for what was reached before, which is waited for, unless the node is kept from its users meanwhile. What
// was asked for before that counts from then on.
func timeLeft(v *View) (left, timeout time.Duration, limited bool) {
	since := v.Node.GPU.Spec.ChangeTime.Time
	if since.IsZero() || v.TargetIsLastGood() && !v.MadeUnavailable() {
		return 0, 0, false
	}
	if v.TargetIsLastGood() || v.FallsBack {
		since = timing.Latest(since, unavailableSince(v))
	}
	timeout = timing.ApplyTimeout
	if _, waits := whyNotRebooted(v); !waits && rebootPermitted(v) {
		timeout = timing.RebootTimeout
	}
	return since.Add(timeout).Sub(v.Snapshot.Now), timeout, true
}

// releaseFailed reports whether the release of the node failed, and its scheduling was restored. There is no other
// state to go back to. To drain it once more at once, and to pause NVIDIA's clients, would disturb the node again and
// again.
func releaseFailed(v *View) bool {
	if v.Policy != nil || v.Taint() != nil || !v.ChangeIsDisruptive() {
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
	r := Result{State: Failed, Reason: t.Reason}
	r.Next = atOnce(RestoreScheduling(v, "the change did not end in time")...)
	r.Message = fmt.Sprintf("The change did not end in time. At %s the operator removed its taint and resumed NVIDIA's programs",
		format.Clock(t.At))
	if pods := podsNotEnding(v); len(pods) > 0 {
		r.Message += "; these pods of NVIDIA's do not end: " + format.List(pods)
	}
	r.Message = agentMessage(v, r.Message)
	if _, reboot := whyNotRebooted(v); reboot {
		r.Message += ". A GPU takes its MIG mode only at a reboot. Reboot the node"
		return r
	}
	left := t.Until().Sub(v.Snapshot.Now)
	if r.After = max(left, 0); left <= 0 {
		r.Message += "; the operator tries again when nobody uses what must be changed: " + describeBlockers(v)
		return r
	}
	r.Message += fmt.Sprintf("; the operator tries again at %s", format.Clock(t.Until()))
	if v.Policy == nil {
		r.Message += " if nobody uses the GPUs then"
	}
	return r
}

// rebooting lets the agent reboot a node that nobody uses, then waits for it.
func rebooting(v *View, r Result) Result {
	if rebootPermitted(v) {
		return applying(v)
	}
	r.State, r.Reason = Idle, v1alpha1.ReasonRebooting
	r.Message = "a MIG mode changes only at a reboot; nobody uses a GPU of the node, and it is going to be rebooted"
	r.Next = withSlot(v, permitReboot(v))
	return r
}
