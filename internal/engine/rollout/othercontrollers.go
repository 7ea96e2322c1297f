// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// recordOthers keeps the annotation true on a node that a policy governs, and removes it from others.
func recordOthers(m *member, governed bool) {
	value, why, remaining := "", node.ForgetsOthers, time.Duration(0)
	if governed {
		value, why, remaining = node.NoteOfOthers(m.View)
	}
	m.After = timing.Sooner(m.After, remaining)
	if value == m.Node.Annotations[v1alpha1.AnnotationOtherController] {
		return
	}
	patch := m.Patch(why)
	patch.Annotations[v1alpha1.AnnotationOtherController] = nil
	if value != "" {
		patch.Annotations[v1alpha1.AnnotationOtherController] = &value
	}
	m.Actions = append(m.Actions, patch)
}
