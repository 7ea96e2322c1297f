// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// The agent is asked for the target by one write of GPUNode.spec (spec.go), and then waited for.

// setNonDisruptively changes the spec of a node on which nothing has to be idle.
func setNonDisruptively(v *View) Result {
	r := Result{
		State: PendingNonDisruptive, Reason: underwayReason(v),
		Message: "the node is not in the desired state yet; the change disturbs nothing that runs",
	}
	if disabling, pending := awaitMIGManagerDisabled(v); pending {
		if _, paced := SplitAct(disabling.Next); len(paced.Start) > 0 {
			disabling.State = r.State
		}
		return disabling
	}
	if r, pending := prepareForMPS(v, r.State); pending {
		return r
	}
	if patch, unsaved := unsavedBaseline(v); unsaved {
		r.Next = withSlot(v, patch)
		return r
	}
	r.Next = withSlot(v, requestTarget(v))
	return r
}

// changeIdleNode goes on with a node that is drained: it disables NVIDIA's mig-manager and stops NVIDIA's operands
// where steps need that, then asks the agent for the target.
func changeIdleNode(v *View, r Result, targetInSpec bool) Result {
	gates := []gateFunc{awaitNVIDIAMPSRecorded, awaitMIGManagerDisabled, awaitOperandsStopped, awaitNVIDIAMPSOff}
	if mustRemoveNVIDIAMPS(v) {
		gates = []gateFunc{awaitNVIDIAMPSRecorded, awaitMIGManagerDisabled, awaitNVIDIAMPSOff, awaitOperandsStopped}
	}
	for _, gate := range gates {
		if r, pending := gate(v); pending {
			return stopping(v, r, targetInSpec)
		}
	}
	switch {
	case targetInSpec && OnlyRebootLeft(v):
		return rebooting(v, r)
	case targetInSpec:
		return applying(v)
	}
	r.State, r.Message = Idle, "nothing blocks the change"
	if patch, unsaved := unsavedBaseline(v); unsaved {
		r.Next = withSlot(v, patch)
		return r
	}
	r.Next = withSlot(v, requestTarget(v))
	return r
}

// applying waits for the agent.
func applying(v *View) Result {
	r := Result{State: Applying, Reason: v1alpha1.ReasonApplying, Message: agentMessage(v, "the agent is changing the GPUs")}
	if reason, message, is := v.ApplyStalled(); is {
		return failChange(v, r, reason, message)
	}
	if patch, found := recordFoundIntervals(v); found {
		r.Next = atOnce(patch) // the agent has been asked and waits for it, also where the rollout is held back
		return r
	}
	if v.Node.BaselineLost {
		r.Next = atOnce(recordBaseline(v))
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
	remaining, timeout, limited := timeRemaining(v)
	if !limited {
		return r
	}
	if remaining = v.OrGrace(remaining); remaining <= 0 {
		return failChange(v, r, late, agentMessage(v, fmt.Sprintf("the GPUs did not match the desired state within %s", timeout))+help)
	}
	r.Next, r.After = atOnce(syncAhead(v)...), remaining
	return r
}

// timeRemaining returns how much remains of the time that the agent has for what it was asked, and how long that is. It
// is not limited for what was reached before, which is waited for, unless the node is kept from its users meanwhile.
// What was asked for before that counts from then on.
func timeRemaining(v *View) (remaining, timeout time.Duration, limited bool) {
	since := v.Node.GPU.Spec.ChangeTime.Time
	if since.IsZero() || v.TargetIsLastGood() && !v.MadeUnavailable() {
		return 0, 0, false
	}
	if v.TargetIsLastGood() || v.FallsBack {
		since = timing.Latest(since, unavailableSince(v))
	}
	timeout = AgentTimeout(v)
	return since.Add(timeout).Sub(v.Snapshot.Now), timeout, true
}

// AgentTimeout is how long the agent may take for what it was asked.
func AgentTimeout(v *View) time.Duration {
	if _, waits := whyNotRebooted(v); !waits && rebootPermitted(v) {
		return timing.RebootTimeout
	}
	return timing.ApplyTimeout
}
