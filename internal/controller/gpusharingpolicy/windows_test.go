// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"fmt"
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
