// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package budget

import (
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/group"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/maintenance"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
)

// slotTimeout is how long after its last step a change keeps its slot in the budget. No step takes longer: a node reboots
// within RebootTimeout, NVIDIA's mig-manager ends within ManagerTimeout.
const slotTimeout = 30 * time.Minute

// SlotOf is the slot that the node holds. It follows from the state of the node and from what the controller itself has
// written there, never from what another client may write late.
func SlotOf(m *group.Member) group.Slot {
	if !hasBegun(m) {
		return group.Slot{}
	}
	until := slotDeadline(m.View)
	if until.After(m.World.Now) {
		return group.Slot{Holds: true, Until: until}
	}
	return group.Slot{Until: until, Expired: true}
}

// hasBegun reports whether a change has begun on the node and is not over. A node that failed or that
// cannot honour its policy counts only as long as the operator keeps pods or NVIDIA's programs off it, or rolls it back. A
// degraded one counts as long as the former.
func hasBegun(m *group.Member) bool {
	changing := []state.State{state.Applying, state.Selecting, state.Verifying, state.Releasing}
	if m.State == state.Failed {
		return m.Disturbed() || slices.Contains(changing, m.Rollback) || m.Policy != nil && acts(m)
	}
	if m.State == state.Unsupported {
		return m.Disturbed()
	}
	return m.Disturbed() || slices.Contains(changing, m.State) || m.InFlight()
}

// acts reports whether anything is done about the node, or will be once it has a slot.
func acts(m *group.Member) bool {
	_, step := gate.Split(m.Next)
	return len(m.Actions)+len(step.Start) > 0
}

// slotDeadline is the deadline of the slot. It counts from the last step that the controller has recorded.
func slotDeadline(v *view.View) time.Time {
	if at, was := view.InterruptedAt(v); was {
		return at.Add(timing.MaintenanceTimeout)
	}
	if at, was := view.LostAt(v); was {
		return at
	}
	last := timing.Latest(v.Node.GPU.Spec.ChangeTime.Time, view.SelectedAt(v))
	if len(view.Ours(v)) > 0 {
		last = timing.Latest(last, v.Node.HeldSince)
	}
	if at, asked := view.AskedFor(v, v.Node.Labels[v1alpha1.LabelMIGConfig]); asked {
		last = timing.Latest(last, at)
	}
	until := last.Add(slotTimeout)
	if !gate.DrainsSince(v).IsZero() { // without its time, as another client may write it, nothing would end the drain
		until = timing.Latest(until, v.World.Now.Add(gate.DrainLeft(v)+timing.PauseTimeout+time.Minute))
	}
	return until
}

// Reclaim ends a change whose slot has expired: the node takes pods again and NVIDIA's clients run again. Where the agent was
// lost in the middle the controller records that, so that the change begins anew once the agent is back.
func Reclaim(m *group.Member) {
	if !acts(m) {
		UntilExpired(m)
	}
	if _, is := view.UnderMaintenance(m.View); is || !m.Expired {
		return
	}
	if _, waits := maintenance.AsksAgain(m.View); waits && m.Node.AgentReady {
		return // NVIDIA's device plugin must not start before the agent has made its instances again
	}
	if m.Disturbed() {
		_, step := gate.Split(m.Next)
		if slices.ContainsFunc(step.Start, action.Frees) { // with the record that the change failed, or the node would take the next slot again
			m.Actions = append(m.Actions, step.Start...)
		}
		m.Next = nil
		if !slices.ContainsFunc(m.Actions, action.Frees) {
			m.Actions = append(m.Actions, giveBack(m)...)
		}
	}
	if m.State == state.Unknown && m.InFlight() && !view.WasInterrupted(m.View) {
		patch := m.Patch("recording that the agent was lost during the change")
		patch.Annotations[v1alpha1.AnnotationInterrupted] = new(timing.Stamp(view.StampAgentLost, m.World.Now))
		m.Actions = append(m.Actions, patch)
	}
}

// giveBack ends a change that has made no step in time. Where the agent is away the change goes on once it is back;
// else, with a step left that would take the same from the node again, not at once.
func giveBack(m *group.Member) []action.Action {
	const why = "the change has made no step in time"
	if m.State == state.Unknown || !m.Disruptive() {
		return gate.LetGo(m.View, why)
	}
	return gate.TimeOut(m.View, m.Reason, why)
}

// UntilExpired decides again once the slot expires, because nothing else may happen until then.
func UntilExpired(m *group.Member) {
	if m.Holds {
		m.After = timing.Sooner(m.After, m.Until.Sub(m.World.Now))
	}
}
