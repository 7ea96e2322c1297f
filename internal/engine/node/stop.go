// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// awaitOperandsStopped is the gate before steps that need all handles closed: NVIDIA's operands are stopped and gone. A
// label of any value but true and false is another controller's, and stays.
func awaitOperandsStopped(v *View) (Result, bool) {
	if !v.Closes() || !v.ByGPUOperator() {
		return Result{}, false
	}
	r := Result{State: StoppingOperands, Reason: v1alpha1.ReasonStoppingOperands, Next: withSlot(v)}
	deploy := mustStop(v)
	for _, name := range deploy {
		value := v.Node.Labels[name]
		if value != "" && value != "true" && value != "false" && !slices.Contains(StoppedByOperator(v), name) {
			r.Message = fmt.Sprintf("another controller has set %s=%s; waiting until it is true or false again", name, value)
			return r, true
		}
	}
	if patch, stops := stopPatch(v, deploy); stops {
		r.Message, r.Next = "stopping NVIDIA's operands, which must close their handles", withSlot(v, patch)
		return r, true
	}
	remain := operandPods(v, StoppedByOperator(v)...)
	var deletions []action.Action
	for _, p := range v.Node.Pods {
		if !p.Validator {
			continue
		}
		remain = append(remain, p.Namespace+"/"+p.Name)
		if !p.Terminating {
			deletions = append(deletions, deletePod(v, p, "it is a test of the GPU Operator's validator and holds a GPU"))
		}
	}
	if len(deletions) > 0 {
		r.Next = atOnce(deletions...)
	}
	r.Message = "waiting until NVIDIA's operands are gone: " + format.List(remain)
	return r, len(remain) > 0
}

// stopping gives NVIDIA's programs their time to end.
func stopping(v *View, r Result, targetInSpec bool) Result {
	if _, paced := SplitAct(r.Next); len(paced.Start) > 0 || r.State == Failed {
		return r
	}
	remaining, timeout := stopRemaining(v, targetInSpec)
	if remaining = v.OrGrace(remaining); remaining > 0 {
		r.After = timing.Sooner(r.After, remaining)
		return r
	}
	message := fmt.Sprintf("not within %s: %s", timeout, r.Message)
	if len(podsNotEnding(v)) > 0 {
		r.Reason = v1alpha1.ReasonOperandsNotEnding
	}
	if r.Next = nil; hasFallback(v) {
		r.Next = atOnce(RestoreScheduling(v, "they did not end in time")...)
	}
	return failChange(v, r, r.Reason, message)
}

// stopRemaining is how much of their time remains, and how long that is. It begins with the stopping, or where nothing is
// stopped yet with the end of the time for draining, and anew on the way back. While the agent is at work its time counts, if
// that is longer.
func stopRemaining(v *View, targetInSpec bool) (remaining, timeout time.Duration) {
	since := v.Snapshot.Now.Add(DrainRemaining(v))
	if taken := unavailableSince(v); len(StoppedByOperator(v)) > 0 && !taken.IsZero() {
		since = taken
	}
	if f := recordedFailure(v); f != nil {
		since = timing.Latest(since, f.Time.Time)
	}
	remaining, timeout = since.Add(timing.StopTimeout).Sub(v.Snapshot.Now), timing.StopTimeout
	if agents, most, limited := timeRemaining(v); targetInSpec && limited && BusyFor(v) > 0 && agents > remaining {
		return agents, most
	}
	return remaining, timeout
}
