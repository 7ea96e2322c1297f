// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// PodOf is the pod of a blocker; nil if it has none, or one that is gone already.
func (v *View) PodOf(b plan.Blocker) *cluster.Pod {
	at := slices.IndexFunc(v.Node.Pods, func(p cluster.Pod) bool {
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
