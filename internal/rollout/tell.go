// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// tell says on the GPUNode what a node without a policy waits for, and takes that back once it goes on or is back.
func (m *member) tell() []Action {
	say := Tell{Node: m.node.Name}
	_, maintained := m.maintenance()
	if m.by == nil && m.listed() && (maintained || m.stands()) {
		if slices.ContainsFunc(m.actions, leadsOn) {
			return nil // and is said in the next pass, if it still stands then
		}
		say.Reason, say.Message = m.reason, m.message
	}
	if m.node.GPU.Annotations[v1alpha1.AnnotationWaiting] == say.Note() {
		return nil
	}
	return []Action{say}
}

// stands says whether the GPUs of the node are not being changed yet, or no longer.
func (m *member) stands() bool {
	return slices.Contains([]State{
		StateFailed, StateImpossible, StateUndiscovered, StateStaleDisruptive, StateDraining, StateQuiescing,
	}, m.State)
}

// leadsOn says whether an action brings a node further. An eviction may go on for long.
func leadsOn(a Action) bool {
	_, evicts := a.(Evict)
	return !evicts
}

// Note is the annotation; empty if there is to be none.
func (a Tell) Note() string {
	const most = 2048 // an annotation may be longer, but nobody reads that
	if a.Reason == "" {
		return ""
	}
	return cut(a.Reason+": "+a.Message, most)
}
