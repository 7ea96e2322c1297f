// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Each gate makes a result:
//
//	gate → Result{state, reason, message, next: Act | PacedAct | nil} → next gate
//	     → not in time: failChange (failure.go)
//
// A PacedAct is only proposed: rollout's budget and windows decide whether it is taken now. An Act asks neither; like
// any write it is left out for a while if it was repeated too often (rollout/repeats.go).

// Result is the state of a node and what follows from it.
type Result struct {
	State
	Reason, Message string
	Next            NextAct
	After           time.Duration // when to look again; 0: no need
	// Rollback is, for a node with a recorded failure (afterFailure), the state that the node would have without it: how
	// far it is on its way back or, where nothing goes back, PendingDisruptive. Empty: no failure is recorded.
	Rollback State
}

// gateFunc is a gate that a change has to pass. It reports what the node waits for, with the act that brings that
// about if one is left, and whether it waits. Its name says what is waited for: awaitUntainted, awaitAdvertised.
type gateFunc func(*View) (Result, bool)

// Finding is something that is left half-done on a node, by the operator or by another controller.
type Finding struct {
	Reason, Message string          // empty: nothing, or not yet
	Beside          bool            // no change waits for it, so it is the reason of no node that is being changed
	Repair          []action.Action // what is ours to put right
	After           time.Duration   // when to look again; 0: no need
}

// underwayReason is the reason of a node on which nothing in particular is waited for.
func underwayReason(v *View) string {
	if v.Policy == nil {
		return v1alpha1.ReasonRestoring
	}
	return v1alpha1.ReasonProgressing
}

// agentMessage adds to a message what the agent says of why it is not done: the end, which says what came of it, as the
// GPUNode has all of it.
func agentMessage(v *View, message string) string {
	const most, least = 154, 72 // characters, so that how it goes on has room too
	for _, c := range v.Node.GPU.Status.Conditions {
		if c.Type == v1alpha1.ConditionApplied && c.Status != metav1.ConditionTrue && c.Message != "" &&
			c.ObservedGeneration == v.Node.GPU.Generation {
			said := fmt.Sprintf("%s; the agent says %s: ", message, c.Reason)
			return said + format.End(strings.TrimSuffix(c.Message, "; it is tried again"), max(most-utf8.RuneCountInString(said), least))
		}
	}
	return message
}

// agentAwayMessage adds to a message that the agent is away for that reason.
func agentAwayMessage(why string) string {
	return why + "; the agent leaves the node meanwhile and returns by itself"
}

// NextAct is what is done about a node after a result: an act, a PacedAct, or nil if nothing is done. Gates make one
// by atOnce or withSlot. What is left half-done on a node is repaired beside it, whatever comes next (Finding).
//
//sumtype:decl
type NextAct interface{ isNext() }

// Act waits for no slot in the budget: it goes on with a change that has begun, or restores what the operator took from
// the node.
type Act []action.Action

// PacedAct is an act that begins a stage of a change. It needs a slot in the budget.
type PacedAct struct {
	// Start is done when the slot is given; empty while the change waits.
	Start []action.Action
	// OnDenied is done instead of Start when the change may not go on: it leaves the node as if none had begun.
	OnDenied []action.Action
}

func (Act) isNext() {}

func (PacedAct) isNext() {}

// atOnce returns the act of those actions; nil if there are none.
func atOnce(actions ...action.Action) NextAct {
	if len(actions) == 0 {
		return nil
	}
	return Act(actions)
}

// withSlot returns the PacedAct of those actions; nil if there are none and the operator holds nothing on the node, or
// the agent is at work. Without actions the change waits, and is undone all the same if it may not go on.
func withSlot(v *View, actions ...action.Action) NextAct {
	restore := restoreSchedulingUnlessBusy(v, "the change is held back")
	if len(actions)+len(restore) == 0 {
		return nil
	}
	return PacedAct{Start: actions, OnDenied: restore}
}

// SplitAct returns what is done at once, and what needs a slot. At most one of them has actions.
func SplitAct(next NextAct) (Act, PacedAct) {
	switch next := next.(type) {
	case Act:
		return next, PacedAct{}
	case PacedAct:
		return nil, next
	case nil:
	}
	return nil, PacedAct{}
}
