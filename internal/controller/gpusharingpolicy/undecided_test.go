// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestUndecided: a definition of NVIDIA's serves no version, so that nobody can tell whether the DRA driver has taken
// over.
func TestUndecided(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	s := newScenario(t, cluster)
	s.machine("t4", sim.T4)
	s.policy("research", timeSlicing(4))
	s.settle()
	s.expectReady("research")
	observed := s.getPolicy("research").Status

	const definition = "gpuclusters.nvidia.com"
	s.Expect(cluster.Serve(s.ctx(), definition)).To(Succeed())
	s.policy("fresh", "{nodeSelector: {matchLabels: {no: such}}, sharing: {strategy: Exclusive}}")
	c := s.controller()
	reconcileOnce := func() time.Duration {
		s.t.Helper()
		result, err := c.Reconcile(log.IntoContext(s.ctx(), logr.Discard()), reconciliation())
		s.Expect(err).NotTo(HaveOccurred())
		return result.RequeueAfter
	}
	s.announced()
	s.Expect(reconcileOnce()).To(BeNumerically(">", 0), "it looks again by itself")
	s.clock.Step(59 * time.Second)
	s.Expect(reconcileOnce()).To(BeNumerically(">", 0))
	s.Expect(s.getPolicy("research").Status).To(Equal(observed), "what usually passes within seconds is not reported")
	since := s.clock.Now().Add(-59 * time.Second).UTC().Format(time.RFC3339)
	s.clock.Step(time.Second)
	s.Expect(reconcileOnce()).To(BeNumerically(">", 0))
	for _, name := range []string{"research", "fresh"} {
		message := s.expectCondition(name, v1alpha1.ConditionReady, metav1.ConditionUnknown, v1alpha1.ReasonClusterNotRead)
		s.Expect(message).To(Equal("The controller decides nothing since " + since + ": CustomResourceDefinition gpuclusters.nvidia.com serves no version, so " +
			"GPUCluster is not read yet; serve one of its versions, or delete it"))
	}
	s.expectCondition("research", v1alpha1.ConditionAccepted, metav1.ConditionTrue, v1alpha1.ReasonAccepted)
	s.expectCondition("fresh", v1alpha1.ConditionAccepted, metav1.ConditionUnknown, v1alpha1.ReasonClusterNotRead)
	s.Expect(s.announced()).To(ContainElement(HavePrefix("Warning " + v1alpha1.ReasonClusterNotRead)))

	s.writes = nil
	s.clock.Step(time.Hour)
	reconcileOnce()
	s.Expect(s.writes).To(BeEmpty(), "reported once")
	s.Expect(cluster.Serve(s.ctx(), definition, "v1beta1")).To(Succeed())
	s.Eventually(func() []string { reconcileOnce(); return s.writes }, "20s", "100ms").ShouldNot(BeEmpty())
	s.expectReady("research")

	s.Expect(cluster.Serve(s.ctx(), definition)).To(Succeed())
	s.clock.Step(time.Hour)
	reconcileOnce()
	s.expectReady("research") // the time counts from the first reconcile that could not decide
}
