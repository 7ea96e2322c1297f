// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package change

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/nvidiamps"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
)

// done removes our taint and records what was reached.
func done(v *view.View) gate.Judgement {
	j := gate.Judgement{State: state.UpToDate, Reason: v1alpha1.ReasonReady}
	if v.Taint() != nil {
		j.State, j.Reason, j.Message = state.Releasing, v1alpha1.ReasonProgressing, "done; the taint of the operator is being removed"
		j.Next = gate.AtOnce(action.Untaint{Node: v.Node.Name})
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
