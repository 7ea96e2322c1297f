// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// PodOf is the pod of a blocker; nil if it has none, or one that is gone already.
func (v *View) PodOf(b plan.Blocker) *world.Pod {
	at := slices.IndexFunc(v.Node.Pods, func(p world.Pod) bool {
		if b.Holder != nil {
			return p.Namespace == b.Holder.Namespace && p.Name == b.Holder.Pod
		}
		return b.Process != nil && b.Process.PodUID != "" && p.UID == b.Process.PodUID
	})
	if at < 0 {
		return nil
	}
	return &v.Node.Pods[at]
}
