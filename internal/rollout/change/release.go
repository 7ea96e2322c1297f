// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package change

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/nvidiamig"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/nvidiamps"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
)

// released is the state of a node whose GPUs are the administrator's again, and NVIDIA's mig-manager applies what they ask for. The operator
// changes them no more, so it needs no report of the agent.
func released(v *view.View) gate.Judgement {
	for _, gate := range []gate.Func{selecting, nvidiamig.Answered, agentLeftPaused} {
		if j, pending := gate(v); pending {
			return j
		}
	}
	return done(v)
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
	j := gate.Judgement{State: state.UpToDate, Reason: v1alpha1.ReasonReady}
	if v.Taint() != nil {
		j.State, j.Reason, j.Message = state.Releasing, v1alpha1.ReasonProgressing, "done; the taint of the operator is being removed"
		j.Next = gate.AtOnce(gate.Untaint(v)...)
		return j // what was reached is recorded after that, together with Ready
	}
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
