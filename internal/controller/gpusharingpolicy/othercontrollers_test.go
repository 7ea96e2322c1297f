// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// testTwoBudgets: the API server cannot evict such a pod at all, and answers 500.
func testTwoBudgets(s *scenario) {
	m := s.machine("a100", sim.A100)
	s.pod("default", "holder", "a100", func(p *corev1.Pod) { p.Labels = map[string]string{"app": "holder"} })
	var uuid string
	m.hardware.Update(func(n *sim.Node) { uuid = n.GPUs[0].UUID })
	s.Expect(m.hardware.SetHolders(uuid, gpu.Holder{Namespace: "default", Pod: "holder", Container: "main", Instance: gpu.WholeGPU})).To(Succeed())
	s.others()
	one := s.budget("holder")
	two := one.DeepCopy()
	two.Name, two.ResourceVersion, two.UID = "second", "", ""
	s.Expect(s.client.Create(s.ctx(), two)).To(Succeed())
	s.t.Cleanup(func() {
		_ = s.client.Delete(context.Background(), one)
		_ = s.client.Delete(context.Background(), two)
	})
	s.policy("research", migPolicy("Evict"))
	controller := s.controller()
	reconcileOnce := func() string {
		s.t.Helper()
		_, err := controller.Reconcile(log.IntoContext(s.ctx(), logr.Discard()), reconciliation())
		s.Expect(err).NotTo(HaveOccurred())
		s.others()
		return s.getPolicy("research").Status.Pending[0].Message
	}
	const refused = "; pod default/holder is not evicted: it has several PodDisruptionBudgets; leave one"
	message := ""
	for range 10 {
		message = reconcileOnce()
	}
	s.Expect(message).To(HaveSuffix(refused))
	s.Expect(s.expectCondition("research", v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).To(HaveSuffix(refused))
	s.clock.Step(time.Hour)
	s.Expect(reconcileOnce()).To(And(HavePrefix("Not idle within"), Not(ContainSubstring("PodDisruptionBudgets"))), "not asked for an hour")
	s.Expect(s.announced()).To(ContainElement(And(
		HavePrefix("Warning "+v1alpha1.EventEvictionBlocked+" "), HaveSuffix(" Pod default/holder is not evicted: it has several PodDisruptionBudgets; leave one"))))
}

// testDRADaemonSet: a pod of it may be away for a moment.
func testDRADaemonSet(s *scenario) {
	s.machine("t4", sim.T4)
	s.machine("a100", sim.A100)
	set, _ := nodesim.NewDRADriver("default", map[string]string{"kubernetes.io/hostname": "t4"})
	for _, o := range append(nodesim.NewDRAAccess("default"), set) {
		s.Expect(s.client.Create(s.ctx(), o)).To(Succeed())
		s.t.Cleanup(func() { _ = s.client.Delete(context.Background(), o) })
	}
	s.policy("research", timeSlicing(4))
	s.settle()
	message := s.expectCondition("research", v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonDRADriverActive)
	s.Expect(message).To(ContainSubstring("node t4: DaemonSet default/" + set.Name + " of NVIDIA's DRA driver"))
	s.Expect(s.node("t4").Annotations).To(HaveKeyWithValue(v1alpha1.AnnotationOtherController, v1alpha1.ReasonDRADriverActive))
	s.Expect(s.allocatable("a100")).To(Equal(map[string]int64{"nvidia.com/gpu": 4}))
}

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
