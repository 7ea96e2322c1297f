// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package change

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/baseline"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/clients"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamps"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// paused is the gate before steps that need all handles closed: NVIDIA's clients are stopped and gone. A label of any
// value but true and false is another controller's pause, and stays.
func paused(v *view.View) (gate.Judgement, bool) {
	if !v.Closes() || !v.ByGPUOperator() {
		return gate.Judgement{}, false
	}
	j := gate.Judgement{State: state.PausingClients, Reason: v1alpha1.ReasonPausingClients, Next: gate.WithSlot(v)}
	for _, name := range world.DeployLabels() {
		value := v.Node.Labels[name]
		if value != "" && value != "true" && value != "false" && !slices.Contains(view.Ours(v), name) {
			j.Message = fmt.Sprintf("another controller has set %s=%s; waiting until it is true or false again", name, value)
			return j, true
		}
	}
	if patch, pauses := clients.Pause(v); pauses {
		j.Message, j.Next = "pausing NVIDIA's GPU clients, which must close their handles", gate.WithSlot(v, patch)
		return j, true
	}
	remain := view.Clients(v, view.Ours(v)...)
	var deletions []action.Action
	for _, p := range v.Node.Pods {
		if !p.Validator {
			continue
		}
		remain = append(remain, p.Namespace+"/"+p.Name)
		if !p.Terminating {
			deletions = append(deletions, gate.DeletePod(v, p, "it is a test of the GPU Operator's validator and holds a GPU"))
		}
	}
	if len(deletions) > 0 {
		j.Next = gate.AtOnce(deletions...)
	}
	j.Message = "waiting until NVIDIA's GPU clients are gone: " + format.List(remain)
	return j, len(remain) > 0
}

// pauseClients fences NVIDIA's mig-manager and pauses NVIDIA's clients where steps need that, then lets the agent go.
func pauseClients(v *view.View, j gate.Judgement, asks bool) gate.Judgement {
	gates := []gate.Func{nvidiamps.Remember, nvidiamig.Fence, paused, nvidiamps.KeepOff}
	if view.Ousts(v) {
		gates = []gate.Func{nvidiamps.Remember, nvidiamig.Fence, nvidiamps.KeepOff, paused}
	}
	for _, gate := range gates {
		if g, pending := gate(v); pending {
			return pausing(v, g, asks)
		}
	}
	switch {
	case asks && view.Reboots(v):
		return rebooting(v, j)
	case asks:
		return applying(v)
	}
	j.State, j.Message = state.Idle, "nothing blocks the change"
	if patch, unsaved := baseline.Unsaved(v); unsaved {
		j.Next = gate.WithSlot(v, patch)
		return j
	}
	j.Next = gate.WithSlot(v, desired.SetSpec(v))
	return j
}

// pausing gives NVIDIA's programs their time to end.
func pausing(v *view.View, j gate.Judgement, asks bool) gate.Judgement {
	if _, step := gate.Split(j.Next); len(step.Start) > 0 || j.State == state.Failed {
		return j
	}
	left, timeout := pauseLeft(v, asks)
	if left > 0 {
		j.After = timing.Sooner(j.After, left)
		return j
	}
	message := fmt.Sprintf("not within %s: %s", timeout, j.Message)
	if len(clients.NotEnding(v)) > 0 {
		j.Reason = v1alpha1.ReasonClientsNotEnding
	}
	if j.Next = nil; gate.HasFallback(v) {
		j.Next = gate.AtOnce(gate.LetGo(v, "they did not end in time")...)
	}
	return gate.Fail(v, j, j.Reason, message)
}

// pauseLeft is how much of their time is left, and how long that is. It begins with the pause, or where nothing is paused yet
// with the end of the time for draining, and anew on the way back. The API server's clock says when the pause was; should it be
// behind ours, the time begins no earlier than our taint. While the agent is at work its time counts, if that is longer.
func pauseLeft(v *view.View, asks bool) (left, timeout time.Duration) {
	since := v.World.Now.Add(gate.DrainLeft(v))
	if taken := gate.TakenSince(v); len(view.Ours(v)) > 0 && !taken.IsZero() {
		since = taken
	}
	if f := view.Failed(v); f != nil {
		since = timing.Latest(since, f.Time.Time)
	}
	left, timeout = since.Add(timing.PauseTimeout).Sub(v.World.Now), timing.PauseTimeout
	if agents, most, limited := timeLeft(v); asks && limited && agents > left {
		return agents, most
	}
	return left, timeout
}
