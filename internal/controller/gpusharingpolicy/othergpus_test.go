// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"fmt"
	"slices"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAVirtualMachineThatGetsOtherGPUsEachDay keeps its Node, as on a cloud that stops it each night. The API server
// takes every spec of its GPUNode, also the last one: the node returns to its baseline when its policy is deleted.
func TestAVirtualMachineThatGetsOtherGPUsEachDay(t *testing.T) {
	t.Parallel()
	s := newOpenScenario(t, env.Start(t, env.WithNVIDIA()))
	sixteen := slices.Repeat([]sim.Model{sim.T4}, 16)
	m := s.machine("vm", sixteen...)
	s.policy("research", timeSlicing(4))
	s.settle()
	s.expectReady("research")
	for day := 2; day <= 6; day++ {
		other, err := sim.NewNode(fmt.Sprint("host-", day), sixteen...)
		s.Expect(err).NotTo(HaveOccurred())
		m.hardware.Update(func(n *sim.Node) { n.GPUs = other.GPUs })
		s.withoutRefusal(30)
		s.expectReady("research")
		baseline := s.gpuNode("vm").Spec.Baseline.Devices
		s.Expect(len(baseline)).To(BeNumerically("<=", cluster.MostGPUs))
		for _, g := range other.GPUs {
			s.Expect(baseline).To(ContainElement(HaveField("UUID", g.UUID)), "on day %d", day)
		}
	}
	s.Expect(s.announced()).To(ContainElement(ContainSubstring("Warning " + v1alpha1.EventBaselineForgotten + " Node vm: ")))
	s.Expect(s.client.DeleteAllOf(s.ctx(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	s.withoutRefusal(40)
	s.Expect(s.node("vm").Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
	s.Expect(s.gpuNode("vm").Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
}

// withoutRefusal lets so many reconciles follow one another, of which the API server refuses nothing.
func (s *scenario) withoutRefusal(reconciles int) {
	s.t.Helper()
	for range reconciles {
		_, err := s.reconcile()
		s.Expect(err).NotTo(HaveOccurred())
		s.others()
	}
}
