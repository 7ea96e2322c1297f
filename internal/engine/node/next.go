// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
)

// nextStep is what is done about a node after a result: an act, a PacedStep, or nil if nothing is done. Gates make one by atOnce or withSlot.
// What is left half-done on a node is repaired beside it, whatever comes next (finding).
//
//sumtype:decl
type nextStep interface{ isNext() }

// act waits for no slot in the budget: it goes on with a change that has begun, or gives back what the operator took from the node.
type act []action.Action

// PacedStep is the next step of a change. It needs a slot in the budget.
type PacedStep struct {
	// Start is the step itself; empty while the change waits.
	Start []action.Action
	// OnDenied is done instead of Start when the change may not go on: it leaves the node as if none had begun.
	OnDenied []action.Action
}

func (act) isNext() {}

func (PacedStep) isNext() {}

// atOnce returns the act of those actions; nil if there are none.
func atOnce(actions ...action.Action) nextStep {
	if len(actions) == 0 {
		return nil
	}
	return act(actions)
}

// withSlot returns the PacedStep of those actions; nil if there are none and the operator holds nothing on the node. Without actions the
// change waits, and is given up all the same if it may not go on.
func withSlot(v *View, actions ...action.Action) nextStep {
	giveUp := restoreSchedulingUnlessBusy(v, "the change is held back")
	if len(actions)+len(giveUp) == 0 {
		return nil
	}
	return PacedStep{Start: actions, OnDenied: giveUp}
}

// SplitStep returns what is done at once, and the step that needs a slot. At most one of them has actions.
func SplitStep(next nextStep) (act, PacedStep) {
	switch next := next.(type) {
	case act:
		return next, PacedStep{}
	case PacedStep:
		return nil, next
	case nil:
	}
	return nil, PacedStep{}
}
