// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// leftToManager is the state of a node whose GPUs are the administrator's again, and NVIDIA's mig-manager applies what they
// ask for. The operator changes them no more, so it needs no report of the agent.
func leftToManager(v *View) Result {
	gates := []gateFunc{awaitSelected, awaitMIGManagerDone, awaitAgentResumed}
	if !v.Managed() {
		gates = []gateFunc{awaitSelected, awaitPublishedInTime, awaitUntainted, awaitMIGManagerDone} // the pod of mig-manager does not tolerate the taint, and has yet to come
	}
	for _, gate := range gates {
		if r, pending := gate(v); pending {
			return r
		}
	}
	return changeDone(v)
}

// awaitPublishedInTime is the gate that NVIDIA's DRA driver, where it serves the node, publishes what is there. It is not waited
// for longer than after a change: the desired state of the agent may be reached no more.
func awaitPublishedInTime(v *View) (Result, bool) {
	if !v.ServedByDRADriver() {
		return Result{}, false
	}
	r, pending := awaitPublished(v)
	return r, pending && r.State == Verifying
}

// awaitUntainted removes our taint.
func awaitUntainted(v *View) (Result, bool) {
	return Result{
		State: Releasing, Reason: v1alpha1.ReasonProgressing, Message: "done; the taint of the operator is being removed",
		Next: atOnce(removeTaints(v)...),
	}, v.Taint() != nil
}

// awaitAgentResumed lets the agent return where mig-manager has paused it and given up.
func awaitAgentResumed(v *View) (Result, bool) {
	if v.Node.Labels[v1alpha1.LabelRunsAgent] != cluster.PausedValue {
		return Result{}, false
	}
	actions := resumeAgent(v)
	return Result{
		State: Releasing, Reason: underwayReason(v), Message: "NVIDIA's mig-manager left the agent paused; it is allowed on the node again",
		Next: atOnce(actions...),
	}, len(actions) > 0
}

// changeDone removes our taint and records what was reached.
func changeDone(v *View) Result {
	if r, is := awaitUntainted(v); is {
		return r // what was reached is recorded after that, together with Ready
	}
	r := Result{State: UpToDate, Reason: v1alpha1.ReasonReady}
	if v.Target.ReleasesNode && MPSLabelOverridden(v) {
		return awaitNVIDIAMPSAllowed(v, r)
	}
	r.Next = atOnce(recordReached(v)...)
	return r
}

// awaitNVIDIAMPSAllowed waits until NVIDIA's MPS DaemonSet is allowed on the node again (mpsOverrideNotNeeded), before the node is
// forgotten.
func awaitNVIDIAMPSAllowed(v *View, r Result) Result {
	r.State, r.Reason = Releasing, underwayReason(v)
	r.Message = fmt.Sprintf("Waiting until the operator no longer overrides %s", cluster.LabelMPSCapable)
	if f := staleSharingLabels(v); f.Reason != "" && v.Node.Features.Others == cluster.LabelTrue {
		r.State, r.Reason = Failed, f.Reason
	}
	return r
}
