// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// slotTimeout is how long after it came to its stage a change keeps its slot in the budget. No stage takes longer: a
// node reboots within timing.RebootTimeout, NVIDIA's mig-manager ends within timing.ManagerTimeout.
const slotTimeout = 30 * time.Minute

// slotOf is the slot that the node holds. It follows from the state of the node and from what the controller itself has
// written there, never from what another controller may write late.
func slotOf(m *member) Slot {
	if !hasBegun(m) {
		return Slot{}
	}
	until := slotDeadline(m)
	if until.After(m.Snapshot.Now) {
		return Slot{HoldsSlot: true, SlotUntil: until}
	}
	return Slot{SlotUntil: until, SlotExpired: true}
}

// hasBegun reports whether a change has begun on the node and is not over. A node that failed or that cannot honour its
// policy counts only as long as the operator keeps pods or NVIDIA's programs off it, or rolls it back. A degraded one
// counts as long as the former.
func hasBegun(m *member) bool {
	if m.ForDemand { // what destroys nothing keeps nobody off
		return m.MadeUnavailable()
	}
	changing := []node.State{node.Applying, node.Selecting, node.Verifying, node.Finishing}
	if m.State == node.Failed {
		return m.MadeUnavailable() || slices.Contains(changing, m.Rollback) || m.Policy != nil && acts(m)
	}
	if m.State == node.Unsupported {
		return m.MadeUnavailable()
	}
	return m.MadeUnavailable() || slices.Contains(changing, m.State) || m.InFlight()
}

// acts reports whether anything is done about the node, or will be once it has a slot.
func acts(m *member) bool {
	_, paced := node.SplitAct(m.Next)
	return len(m.Actions)+len(paced.Start) > 0
}

// mostTaken is how long a node is kept from its users after its time for draining: one interruption or reboot, and for
// the change and its way back the times of NVIDIA's programs and of the agent.
const mostTaken = timing.RebootTimeout + 2*(timing.StopTimeout+timing.ApplyTimeout+timing.VerifyTimeout)

// slotDeadline is the deadline of the slot. It counts from the last stage that the controller has recorded, and begins
// anew with each. Whatever begins steps anew, it is no later than mostTaken.
func slotDeadline(m *member) time.Time {
	timeout := slotTimeout
	if m.State == node.Unknown && m.InFlight() && !node.WasInterrupted(m.View) {
		timeout = node.AgentTimeout(m.View) // it is lost by then, and has that time anew once it is back
	}
	until := timing.Latest(stageDeadline(m.View, timeout, pastDrain(m)), m.Snapshot.Now.Add(m.OrGrace(0)))
	if most, taken := takenUntil(m); taken && most.Before(until) {
		return most
	}
	return until
}

// takenUntil is until when a node may be kept from its users at most; taken is false if since when is not known.
func takenUntil(m *member) (most time.Time, taken bool) {
	t := m.Taint()
	if t == nil || t.TimeAdded == nil {
		return time.Time{}, false
	}
	return t.TimeAdded.Add(m.DrainTimeout() + mostTaken), true
}

// pastDrain reports whether the change of a node has come to its GPUs, so that the time for draining is no longer its
// deadline.
func pastDrain(m *member) bool {
	state := m.State
	if state == node.Failed {
		state = m.Rollback
	}
	return slices.Contains([]node.State{node.Applying, node.Selecting, node.Verifying, node.Finishing, node.Degraded, node.UpToDate}, state)
}

// stageDeadline is the deadline of the stage that a change has come to, which may take timeout.
func stageDeadline(v *node.View, timeout time.Duration, pastDrain bool) time.Time {
	if at, was := node.InterruptedAt(v); was {
		return at.Add(timing.MaintenanceTimeout)
	}
	if at, was := node.AgentLostAt(v); was {
		return at
	}
	last := timing.Latest(v.Node.GPU.Spec.ChangeTime.Time, node.ConfigSelectedAt(v))
	if len(node.StoppedByOperator(v)) > 0 {
		last = timing.Latest(last, v.Node.MarkedAtWorkSince)
	}
	if at, asked := node.ManagerRequestedSince(v, v.Node.Labels[v1alpha1.LabelMIGConfig]); asked {
		last = timing.Latest(last, at)
	}
	until := last.Add(timeout)
	if since := node.DrainingSince(v); !since.IsZero() { // without its time, as another controller may write it, nothing would end the drain
		const stops = timing.StopTimeout + time.Minute
		ends := v.Snapshot.Now.Add(node.DrainRemaining(v) + stops)
		if most := since.Add(slotTimeout); pastDrain && most.Before(ends) {
			ends = most
		}
		until = timing.Latest(until, ends)
	}
	return until
}

// reclaimSlot ends a change whose slot has expired: the node takes pods again and NVIDIA's operands run again. Where the
// agent was lost in the middle the controller records that, so that the change begins anew once the agent is back.
func reclaimSlot(m *member) {
	if !acts(m) {
		untilSlotExpires(m)
	}
	if !m.SlotExpired {
		return
	}
	if _, is := node.UnderMaintenance(m.View); is {
		endMaintained(m)
		return
	}
	if _, waits := node.RequestAgain(m.View); waits && m.Node.AgentReady {
		return // NVIDIA's device plugin must not start before the agent has made its instances again
	}
	if m.MadeUnavailable() {
		_, paced := node.SplitAct(m.Next)
		if slices.ContainsFunc(paced.Start, action.Frees) { // with the record that the change failed, or the node would take the next slot again
			m.Actions = append(m.Actions, paced.Start...)
		}
		m.Next = nil
		if !slices.ContainsFunc(m.Actions, action.Frees) {
			m.Actions = append(m.Actions, releaseStale(m)...)
		}
	}
	if m.State == node.Unknown && m.InFlight() && !node.WasInterrupted(m.View) {
		patch := m.Patch("recording that the agent was lost during the change")
		patch.Annotations[v1alpha1.AnnotationInterrupted] = new(timing.Stamp(node.StampAgentLost, m.Snapshot.Now))
		m.Actions = append(m.Actions, patch)
	}
}

// endMaintained makes a node available again that is under maintenance for too long: what its users still lack then,
// NVIDIA or the machine keeps from them. NVIDIA's device plugin stays stopped where it must not see the next driver
// before the agent does; without a driver it could offer nothing.
func endMaintained(m *member) {
	const why = "the maintenance of the node lasts for too long"
	if len(node.RestoreScheduling(m.View, why)) > 0 {
		m.Next, m.Actions = nil, node.EndInterrupted(m.View, why)
	}
}

// releaseStale ends a change that has come to no further stage in time. Where the agent is away the change goes on once
// it is back, for the first time; else, with an act ahead that would take the same from the node again, not at once.
func releaseStale(m *member) []action.Action {
	const why = "the change has made no progress in time"
	switch {
	case m.State == node.Unknown:
		return node.EndInterrupted(m.View, why)
	case !m.ChangeIsDisruptive() && len(node.StoppedByOperator(m.View)) == 0: // with NVIDIA's programs back it may be disruptive again
		return node.RestoreScheduling(m.View, why)
	}
	return node.RecordTimeout(m.View, m.Reason, why)
}

// untilSlotExpires decides again once the slot expires, because nothing else may happen until then.
func untilSlotExpires(m *member) {
	if m.HoldsSlot {
		m.After = timing.Sooner(m.After, m.SlotUntil.Sub(m.Snapshot.Now))
	}
}
