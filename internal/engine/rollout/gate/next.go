// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
)

// Next is what is done about a node after a judgement: an Act, a Step, or nil if nothing is done. Gates make one by AtOnce or WithSlot.
// What is left half-done on a node is repaired beside it, whatever comes next (Finding).
//
//sumtype:decl
type Next interface{ isNext() }

// Act waits for no slot in the budget: it goes on with a change that has begun, or gives back what the operator took from the node.
type Act []action.Action

// Step is the next step of a change. It needs a slot in the budget.
type Step struct {
	// Start is the step itself; empty while the change waits.
	Start []action.Action
	// GiveUp is done instead of Start when the change may not go on: it leaves the node as if none had begun.
	GiveUp []action.Action
}

func (Act) isNext() {}

func (Step) isNext() {}

// AtOnce returns the Act of those actions; nil if there are none.
func AtOnce(actions ...action.Action) Next {
	if len(actions) == 0 {
		return nil
	}
	return Act(actions)
}

// WithSlot returns the Step of those actions; nil if there are none and the operator holds nothing on the node. Without actions the
// change waits, and is given up all the same if it may not go on.
func WithSlot(v *view.View, actions ...action.Action) Next {
	giveUp := GiveBack(v, "the change is held back")
	if len(actions)+len(giveUp) == 0 {
		return nil
	}
	return Step{Start: actions, GiveUp: giveUp}
}

// Split returns what is done at once, and the step that needs a slot. At most one of them has actions.
func Split(next Next) (Act, Step) {
	switch next := next.(type) {
	case Act:
		return next, Step{}
	case Step:
		return nil, next
	case nil:
	}
	return nil, Step{}
}
