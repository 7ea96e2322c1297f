// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
)

// TestWhatIsSaidWhileTheRolloutIsPaused: nothing is being made.
func TestWhatIsSaidWhileTheRolloutIsPaused(t *testing.T) {
	g, p := NewWithT(t), applying()
	a := a100s(t, "a", 1)
	rests(&a)
	p.Spec.Rollout.Paused = true
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a}}
	decided, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
	g.Expect(decided).To(BeEmpty())
	g.Expect(is.Reason).NotTo(Equal(v1alpha1.ReasonRepartitioning), is.Message)
	g.Expect(is.Message).NotTo(ContainSubstring("which are being made"))
}
