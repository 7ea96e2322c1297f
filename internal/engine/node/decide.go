// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// A node is decided on by a chain of gates, in the order of a change. Each gate reports what the node waits for; a node
// for which no gate waits is up to date.
//
//	observe ─ blocked ─ drain ─ stop operands ─ apply ─ select config ─ verify ─ untaint
//	   │         │        │           │           │           │            │
//	   │         │        └───────────┴───────────┴───────────┴────────────┴→ failed → last good state, or baseline
//	   │         └ unsupported, or another controller offers the GPUs
//	   └ the agent does not report
//
// Files: observe.go (with blockers.go and othercontrollers.go), drain.go, stop.go, apply.go, select.go, verify.go,
// untaint.go; failure.go has what follows a failure, with the four that have no state to fall back to. Decisions follow
// from what is observed, so any reconcile may be the first.

// Decide derives the state of a node and what to do about it.
func Decide(v *View) Result {
	if v.Node.NoGPUNode {
		return withoutGPUNode(v)
	}
	r := decideNode(v)
	if m, is := UnderMaintenance(v); is {
		return underMaintenanceResult(v, m, r)
	}
	return continueInterrupted(v, r)
}

// withoutGPUNode is the result of a node that the operator has changed, and whose GPUNode is gone. What was taken of the
// node is given back once the agent, which has no spec any more, can no longer be at work on the last one.
func withoutGPUNode(v *View) Result {
	r := Result{
		State: Unknown, Reason: v1alpha1.ReasonGPUNodeMissing,
		Message: fmt.Sprintf("the node's GPUNode is gone and could not be made again, so nothing is changed or restored. "+
			"The controller's log has the error (writing GPUNode %s): look for a webhook or policy that refuses it", v.Node.Name),
	}
	since := unavailableSince(v)
	if since.IsZero() {
		return r
	}
	if r.After = max(since.Add(timing.ApplyTimeout).Sub(v.Snapshot.Now), 0); r.After == 0 {
		r.Next = atOnce(RestoreScheduling(v, "its GPUNode is gone")...)
	}
	return r
}

// decideNode decides on a node by itself: first what rules out a change, then the change (progress), then what became
// of an earlier one.
func decideNode(v *View) Result {
	if !v.Node.AgentReady && v.Node.GPU.Spec.Reboot != nil {
		return beingRebooted(v)
	}
	if managerLabelRestored(v) {
		return leftToManager(v)
	}
	asked := v.Node.GPU.Spec.Devices
	if problem := dynamicMIG(v); problem != nil && len(asked) > 0 && (v.Policy != nil || !sameDevices(asked, v.Target.Devices)) { // also while the agent is away: it would make them again
		return Result{
			State: Unsupported, Reason: problem.Reason, Message: problem.Message,
			Next: atOnce(withdrawRequest(v, "leaving the MIG instances to NVIDIA's DRA driver")),
		}
	}
	if v.Unsupported != nil && v.Unsupported.Reason == v1alpha1.ReasonNodeOptedOut { // the agent leaves with NVIDIA's programs
		return unsupported(v)
	}
	if r, is := AgentNotReporting(v); is {
		return r
	}
	if v.Unsupported != nil {
		return unsupported(v)
	}
	r := progress(v)
	if f := recordedFailure(v); f != nil && (v.FallsBack || r.State == PendingDisruptive) {
		return afterFailure(v, *f, r)
	}
	return r
}

// unsupported is the result of a node where the policy cannot be honoured. What an earlier desired state has taken of
// the node is given back, once the agent can no longer be at work on that.
func unsupported(v *View) Result {
	return Result{
		State: Unsupported, Reason: v.Unsupported.Reason, Message: v.Unsupported.Message, After: unavailableFor(v),
		Next: atOnce(append(restoreSchedulingUnlessBusy(v, "the policy cannot be honoured here"), keepMIGManagerOff(v)...)...),
	}
}

// unavailableFor is for how long the node is yet kept from its users for what the agent may be at work on; 0: it is not.
func unavailableFor(v *View) time.Duration {
	if !v.MadeUnavailable() {
		return 0
	}
	return BusyFor(v)
}

// progress is the state of a node on its way to its target. The order of the cases matters:
//
//  1. NVIDIA's mig-manager, where it partitions the GPUs: its pod must come to the node, which our taint prevents.
//  2. What must not be drained, stopped or asked for once more, since that would take the node from its users for
//     nothing: instances that are left to others, a node that only a person can reboot, a compute mode that the agent
//     corrects once the GPU is idle, NVIDIA's MPS daemon that another controller's configuration starts, a rest after a
//     timeout, a release that failed.
//  3. A disruptive change, before the agent is asked and, while something blocks it, also afterwards.
//  4. What disrupts nothing: the agent is asked at once, and then waited for.
//  5. GPUs that are as the target has them: the rest of the stages, which need no GPU idle.
func progress(v *View) Result {
	targetInSpec := v.SpecMatchesTarget()
	if r, pending := byManager(v, targetInSpec); pending {
		return r
	}
	timeout, rests := restsAfterTimeout(v)
	switch {
	case instancesLeftToOthers(v):
		return applying(v)
	case targetInSpec && needsManualReboot(v):
		return leftUntilManualReboot(v)
	case v.OnlyComputeMode() || targetInSpec && leftToOthersConfig(v):
		return afterApplying(v)
	case rests:
		return resting(v, timeout)
	case targetInSpec && releaseFailed(v):
		return applying(v)
	case mustDrainAndStop(v, targetInSpec):
		return drainAndStop(v, targetInSpec)
	case !targetInSpec:
		return setNonDisruptively(v)
	}
	if v.Applied() {
		return afterApplying(v)
	}
	if r, over := verifyManager(v); over {
		return r
	}
	return applying(v)
}

// mustDrainAndStop reports whether the node has to be brought to where its GPUs can be changed. Once the agent is
// asked, that is only so while something blocks it, or NVIDIA's operands or MPS daemon must be off the node.
func mustDrainAndStop(v *View, targetInSpec bool) bool {
	return v.ChangeIsDisruptive() && (!targetInSpec || len(v.Blockers) > 0 || v.Closes() || mustRemoveNVIDIAMPS(v))
}

// afterApplying is the state of a node whose GPUs are as its target has them.
func afterApplying(v *View) Result {
	for _, gate := range v.gates() {
		if r, pending := gate(v); pending {
			return r
		}
	}
	return changeDone(v)
}
