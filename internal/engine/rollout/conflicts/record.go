// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package conflicts

import (
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/group"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
)

// Record keeps the annotation true on a node that a policy governs, and removes it from others.
func Record(m *group.Member, governed bool) {
	value, why, left := "", forgetsOthers, time.Duration(0)
	if governed {
		value, why, left = noteOfOthers(m.View)
	}
	m.After = timing.Sooner(m.After, left)
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
