// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

func TestRollout(t *testing.T) {
	cluster := env.Start(t, env.WithNVIDIA())

	t.Run("time-slicing is keys, then the ClusterPolicy, then a label, each once", func(t *testing.T) {
		s := newScenario(t, cluster)
		s.machine("t4", sim.T4, sim.T4)
		s.policy("research", timeSlicing(4))

		written := s.settle()
		s.expectReady("research")
		s.Expect(s.allocatable("t4")).To(Equal(map[string]int64{"nvidia.com/gpu": 8}))
		t.Log(written)
		t.Log(s.announced())
	})
}
