// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAMaintenanceWindowWakesTheController: until it opens nothing is written, and nothing but the clock tells that it
// is open.
func TestAMaintenanceWindowWakesTheController(t *testing.T) {
	t.Parallel()
	s := newScenario(t, env.Start(t, env.WithNVIDIA()))
	s.machine("a100", sim.A100)
	opens := s.clock.Now().UTC().Add(6 * time.Hour).Truncate(time.Hour)
	s.policy("mig", fmt.Sprintf(`{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}, `+
		`rollout: {windows: [{schedule: "0 %d * * *", duration: 4h}]}}`, opens.Hour()))
	s.settle()
	s.expectCondition("mig", v1alpha1.ConditionReady, "False", v1alpha1.ReasonOutsideWindow)
	status := s.getPolicy("mig").Status
	s.Expect(status.NextWindowTime.Time).To(BeTemporally("==", opens))
	s.Expect(status.Pending[0].Reason).To(Equal(v1alpha1.ReasonOutsideWindow))
	s.Expect(s.node("a100").Spec.Taints).To(BeEmpty())

	result, err := s.controller().Reconcile(s.ctx(), reconciliation())
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(result.RequeueAfter).To(Equal(opens.Sub(s.clock.Now())))
	s.clock.Step(result.RequeueAfter)
	s.settle()
	s.expectReady("mig")
	s.Expect(s.getPolicy("mig").Status.NextWindowTime).To(BeNil())
}

// TestNodesThatWorry: what a person should look at is told once on the policy and once on the node, and so is its end.
func TestNodesThatWorry(t *testing.T) {
	t.Parallel()
	s := newScenario(t, env.Start(t, env.WithNVIDIA()))
	s.machine("t4", sim.T4)
	s.policy("t4s", timeSlicing(2))
	s.settle()
	told := func() (all []string) {
		for _, e := range s.announced() {
			if strings.Contains(e, " Node t4: ") && !strings.Contains(e, "nodes ready") && !strings.Contains(e, "node ready") {
				all = append(all, e)
			}
		}
		return all
	}
	s.Expect(told()).To(BeEmpty(), "nothing worries on the way")
	s.label("t4", "nvidia.com/gpu.deploy.operands", "false")
	s.settle()
	s.Expect(told()).To(HaveExactElements(
		HavePrefix("Warning NodeOptedOut Node t4: "), HavePrefix("Warning NodeOptedOut Node t4: "),
	))
	s.label("t4", "nvidia.com/gpu.deploy.operands", "true")
	s.settle()
	end := told() // the device plugin comes back, which may be told too
	s.Expect(len(end)).To(BeNumerically(">=", 2))
	s.Expect(end[len(end)-2:]).To(HaveExactElements(
		HavePrefix("Normal Recovered Node t4: no longer"), HavePrefix("Normal Recovered Node t4: no longer"),
	))
	s.expectReady("t4s")
}
