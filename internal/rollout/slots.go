// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// slotTimeout is how long after its last step a change keeps its slot in the budget. No step takes longer: a node reboots
// within rebootTimeout, NVIDIA's mig-manager ends within managerTimeout.
const slotTimeout = 30 * time.Minute

// slot is the slot that a node holds in the budget of its group. A node takes it with the first write of a change and gives
// it up when the change has succeeded, has failed and was rolled back, or has made no step until the deadline.
type slot struct {
	holds bool
	until time.Time // deadline; set with holds and expired
	// expired reports that the change is not over, but its deadline is: the node counts no longer.
	expired bool
}

// takes is the slot that the node holds. It follows from the state of the node and from what the controller itself has
// written there, never from what another client may write late.
func (m *member) takes() slot {
	if !m.begun() {
		return slot{}
	}
	until := m.slotDeadline()
	if until.After(m.world.Now) {
		return slot{holds: true, until: until}
	}
	return slot{until: until, expired: true}
}

// begun reports whether a change has begun on the node and is not over. A node that failed or that
// cannot honour its policy counts only as long as the operator keeps pods or NVIDIA's programs off it, or rolls it back. A
// degraded one counts as long as the former.
func (m *member) begun() bool {
	changing := []State{StateApplying, StateSelecting, StateVerifying, StateReleasing}
	if m.State == StateFailed {
		return m.disturbed() || slices.Contains(changing, m.rollback) || m.by != nil && len(m.start)+len(m.actions) > 0
	}
	if m.State == StateImpossible {
		return m.disturbed()
	}
	return m.disturbed() || slices.Contains(changing, m.State) || m.inFlight()
}

// slotDeadline is the deadline of the slot. It counts from the last step that the controller has recorded.
func (v *view) slotDeadline() time.Time {
	if at, was := v.interruptedAt(); was {
		return at.Add(maintenanceTimeout)
	}
	if at, was := v.lostAt(); was {
		return at
	}
	last := latest(v.node.GPU.Spec.ChangeTime.Time, v.selectedAt())
	if len(v.ours()) > 0 {
		last = latest(last, v.node.HeldSince)
	}
	if at, asked := v.askedFor(v.node.Labels[v1alpha1.LabelMIGConfig]); asked {
		last = latest(last, at)
	}
	until := last.Add(slotTimeout)
	if !v.drainsSince().IsZero() { // without its time, as another client may write it, nothing would end the drain
		until = latest(until, v.world.Now.Add(v.drainLeft()+quiesceTimeout+time.Minute))
	}
	return until
}

// reclaim ends a change whose slot has expired: the node takes pods again and NVIDIA's clients run again. Where the agent was
// lost in the middle the controller records that, so that the change begins anew once the agent is back.
func (m *member) reclaim() {
	if len(m.start)+len(m.actions) == 0 {
		m.untilExpired()
	}
	if _, is := m.maintenance(); is || !m.expired {
		return
	}
	if _, waits := m.asksAgain(); waits && m.node.AgentReady {
		return // NVIDIA's device plugin must not start before the agent has made its instances again
	}
	if m.disturbed() {
		if slices.ContainsFunc(m.start, frees) { // with the record that the change failed, or the node would take the next slot again
			m.actions = append(m.actions, m.start...)
		}
		m.start, m.giveUp = nil, nil
		if !slices.ContainsFunc(m.actions, frees) {
			m.actions = append(m.actions, m.letGo("the change has made no step in time")...)
		}
	}
	if m.State == StateUndiscovered && m.inFlight() && !m.wasInterrupted() {
		patch := m.patch("recording that the agent was lost during the change")
		patch.Annotations[v1alpha1.AnnotationInterrupted] = new(stamp(stampAgentLost, m.world.Now))
		m.actions = append(m.actions, patch)
	}
}

// untilExpired decides again once the slot expires, because nothing else may happen until then.
func (m *member) untilExpired() {
	if m.holds {
		m.after = Sooner(m.after, m.until.Sub(m.world.Now))
	}
}

// frees reports whether an action makes the node schedulable again.
func frees(a Action) bool {
	_, is := a.(Untaint)
	return is
}
