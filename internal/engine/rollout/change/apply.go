// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package change

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/baseline"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/clients"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/eviction"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamps"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// setGently changes the spec of a node on which nothing has to be idle.
func setGently(v *view.View) gate.Judgement {
	j := gate.Judgement{
		State: state.PendingNonDisruptive, Reason: gate.Underway(v),
		Message: "the node is not in the desired state yet; the change disturbs nothing that runs",
	}
	if fence, pending := nvidiamig.Fence(v); pending {
		if _, step := gate.Split(fence.Next); len(step.Start) > 0 {
			fence.State = j.State
		}
		return fence
	}
	if g, pending := nvidiamps.Prepare(v, j.State); pending {
		return g
	}
	if patch, unsaved := baseline.Unsaved(v); unsaved {
		j.Next = gate.WithSlot(v, patch)
		return j
	}
	j.Next = gate.WithSlot(v, desired.SetSpec(v))
	return j
}

// applying waits for the agent.
func applying(v *view.View) gate.Judgement {
	j := gate.Judgement{State: state.Applying, Reason: v1alpha1.ReasonApplying, Message: gate.AgentMessage(v, "the agent is changing the GPUs")}
	if reason, message, is := v.Stalled(); is {
		return gate.Fail(v, j, reason, message)
	}
	if patch, found := baseline.FoundIntervals(v); found {
		j.Next = gate.WithSlot(v, patch)
		return j
	}
	if v.Node.BaselineLost {
		j.Next = gate.WithSlot(v, desired.RecordBaseline(v))
		return j
	}
	late := v1alpha1.ReasonApplyTimedOut
	help, waits := view.WaitsForReboot(v)
	switch {
	case waits:
		j.Reason, late = v1alpha1.ReasonRebootRequired, v1alpha1.ReasonRebootRequired
		j.Message += help
	case view.Permitted(v):
		j.Reason = v1alpha1.ReasonRebooting
	}
	left, timeout, limited := timeLeft(v)
	if !limited {
		return j
	}
	if left <= 0 {
		return gate.Fail(v, j, late, gate.AgentMessage(v, fmt.Sprintf("the GPUs did not match the desired state within %s", timeout))+help)
	}
	j.Next, j.After = gate.AtOnce(syncAhead(v)...), left
	return j
}

// timeLeft returns how much is left of the time that the agent has for what it was asked, and how long that is. It is
// not limited for what was reached before, which is waited for, unless the node is kept from its users meanwhile. What
// was asked for before that counts from then on.
func timeLeft(v *view.View) (left, timeout time.Duration, limited bool) {
	since := v.Node.GPU.Spec.ChangeTime.Time
	if since.IsZero() || v.Reached() && !v.Disturbed() {
		return 0, 0, false
	}
	if v.Reached() || v.FallsBack {
		since = timing.Latest(since, gate.TakenSince(v))
	}
	timeout = timing.ApplyTimeout
	if _, waits := view.WaitsForReboot(v); !waits && view.Permitted(v) {
		timeout = timing.RebootTimeout
	}
	return since.Add(timeout).Sub(v.World.Now), timeout, true
}

// gaveUp reports whether the release of the node failed, and the node was given back to its users. There is no other state to go
// back to. To drain it once more at once, and to pause NVIDIA's clients, would disturb the node again and again.
func gaveUp(v *view.View) bool {
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
func resting(v *view.View, t view.Timeout) gate.Judgement {
	j := gate.Judgement{State: state.Failed, Reason: t.Reason}
	j.Next = gate.AtOnce(gate.LetGo(v, "the change did not end in time")...)
	j.Message = fmt.Sprintf("The change did not end in time. At %s the operator removed its taint and resumed NVIDIA's programs",
		format.Clock(t.At))
	if pods := clients.NotEnding(v); len(pods) > 0 {
		j.Message += "; these pods of NVIDIA's do not end: " + format.List(pods)
	}
	j.Message = gate.AgentMessage(v, j.Message)
	if _, reboot := view.WaitsForReboot(v); reboot {
		j.Message += ". A GPU takes its MIG mode only at a reboot. Reboot the node"
		return j
	}
	left := t.Until().Sub(v.World.Now)
	if j.After = max(left, 0); left <= 0 {
		j.Message += "; the operator tries again when nobody uses what must be changed: " + eviction.Describe(v)
		return j
	}
	j.Message += fmt.Sprintf("; the operator tries again at %s", format.Clock(t.Until()))
	if v.Policy == nil {
		j.Message += " if nobody uses the GPUs then"
	}
	return j
}

// rebooting lets the agent reboot a node that nobody uses, then waits for it.
func rebooting(v *view.View, j gate.Judgement) gate.Judgement {
	if view.Permitted(v) {
		return applying(v)
	}
	j.State, j.Reason = state.Idle, v1alpha1.ReasonRebooting
	j.Message = "a MIG mode changes only at a reboot; nobody uses a GPU of the node, and it is going to be rebooted"
	j.Next = gate.WithSlot(v, desired.PermitReboot(v))
	return j
}
