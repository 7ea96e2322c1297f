// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package change

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiadra"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamps"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
)

// released is the state of a node whose GPUs are the administrator's again, and NVIDIA's mig-manager applies what they ask for. The operator
// changes them no more, so it needs no report of the agent.
func released(v *view.View) gate.Judgement {
	gates := []gate.Func{selecting, nvidiamig.Answered, agentLeftPaused}
	if !v.Managed() {
		gates = []gate.Func{selecting, published, tainted, nvidiamig.Answered} // the pod of mig-manager does not tolerate the taint, and has yet to come
	}
	for _, gate := range gates {
		if j, pending := gate(v); pending {
			return j
		}
	}
	return done(v)
}

// published is the gate that NVIDIA's DRA driver, where it serves the node, publishes what is there. It is not waited for longer than after a
// change: the desired state of the agent may be reached no more.
func published(v *view.View) (gate.Judgement, bool) {
	if !v.ByDriver() {
		return gate.Judgement{}, false
	}
	j, pending := nvidiadra.Publishing(v)
	return j, pending && j.State == state.Verifying
}

// tainted removes our taint.
func tainted(v *view.View) (gate.Judgement, bool) {
	return gate.Judgement{
		State: state.Releasing, Reason: v1alpha1.ReasonProgressing, Message: "done; the taint of the operator is being removed",
		Next: gate.AtOnce(gate.Untaint(v)...),
	}, v.Taint() != nil
}

// agentLeftPaused lets the agent return where mig-manager has paused it and given up.
func agentLeftPaused(v *view.View) (gate.Judgement, bool) {
	if v.Node.Labels[v1alpha1.LabelClient] != world.PausedValue {
		return gate.Judgement{}, false
	}
	actions := takeBackAgent(v)
	return gate.Judgement{
		State: state.Releasing, Reason: gate.Underway(v), Message: "NVIDIA's mig-manager left the agent paused; it is allowed on the node again",
		Next: gate.AtOnce(actions...),
	}, len(actions) > 0
}

// done removes our taint and records what was reached.
func done(v *view.View) gate.Judgement {
	if j, is := tainted(v); is {
		return j // what was reached is recorded after that, together with Ready
	}
	j := gate.Judgement{State: state.UpToDate, Reason: v1alpha1.ReasonReady}
	if v.Target.Final && view.Overridden(v) {
		return allowing(v, j)
	}
	j.Next = gate.AtOnce(desired.RecordReached(v)...)
	return j
}

// allowing waits until NVIDIA's MPS DaemonSet is allowed on the node again (NotNeeded), before the node is forgotten.
func allowing(v *view.View, j gate.Judgement) gate.Judgement {
	j.State, j.Reason = state.Releasing, gate.Underway(v)
	j.Message = fmt.Sprintf("Waiting until the operator no longer overrides %s", world.LabelMPSCapable)
	if f := nvidiamps.Stale(v); f.Reason != "" && v.Node.Features.Others == world.LabelTrue {
		j.State, j.Reason = state.Failed, f.Reason
	}
	return j
}
