// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// awaitsWindow reports whether the next act of a node's change is one that starts in a maintenance window only. A node
// that goes back to its last good state (Failed) or to its baseline waits for none, nor does one that is not in service
// yet.
func awaitsWindow(m *member) bool {
	unapplied := []node.State{node.PendingDisruptive, node.Draining, node.StoppingOperands, node.Idle}
	switch {
	case m.Policy == nil || startupTaintOn(m.View) != nil || startsUntainted(m) || !slices.Contains(unapplied, m.State):
		return false
	case m.Taint() == nil, node.OnlyRebootLeft(m.View):
		return true
	}
	return m.Policy.Spec.Rollout.OnWindowEnd == v1alpha1.WindowEndCancelDrain
}

// outsideWindow reports why a node waits for a maintenance window, if it does, and looks again when one opens or
// closes.
func outsideWindow(g *Group, s *cluster.Snapshot, m *member) (reason, message string) {
	if len(g.Windows) == 0 || !awaitsWindow(m) {
		return "", ""
	}
	open, changes := g.Windows.At(s.Now)
	m.After = timing.Sooner(m.After, changes.Sub(s.Now))
	if open {
		return "", ""
	}
	g.NextWindow = new(metav1.NewTime(changes))
	if _, paced := node.SplitAct(m.Next); m.MadeUnavailable() && (len(paced.OnDenied) > 0 || node.OnlyRebootLeft(m.View) && devicesUntouched(m.View)) {
		m.Next = node.PacedAct{OnDenied: node.EndTurn(m.View)}
	}
	return v1alpha1.ReasonOutsideWindow, fmt.Sprintf("Waiting for a maintenance window (rollout.windows): the next one opens at %s",
		changes.Format(time.RFC3339))
}

// endLostTurn ends a drain with its window where the agent is lost in the middle, so that no act on the node waits for
// a window. An agent that was asked for something has its time for that.
func endLostTurn(g *Group, s *cluster.Snapshot, m *member) {
	if len(g.Windows) == 0 || m.State != node.Unknown || m.Taint() == nil || m.Policy == nil ||
		m.Policy.Spec.Rollout.OnWindowEnd != v1alpha1.WindowEndCancelDrain {
		return
	}
	open, changes := g.Windows.At(s.Now)
	busy := node.BusyFor(m.View)
	m.After = timing.Sooner(timing.Sooner(m.After, changes.Sub(s.Now)), busy)
	if !open && busy == 0 && len(m.Actions) == 0 {
		m.Actions = append(m.Actions, node.EndTurn(m.View)...)
	}
}

// devicesUntouched reports whether all GPUs of the node are still as they were before the change, so that the node can
// take pods until it is rebooted.
func devicesUntouched(v *node.View) bool {
	before := node.FallbackTarget(v.Policy.Name, &v.Node.GPU, v.Devices)
	for _, want := range before.Devices {
		at := slices.IndexFunc(v.Devices, func(d gpu.Device) bool { return d.UUID == want.UUID })
		if at < 0 || !plan.Met(want.Sharing, plan.Observed(v.Devices[at])) {
			return false
		}
	}
	return len(before.Devices) > 0
}
