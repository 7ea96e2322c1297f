// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestAnUnlicensedGuestIsNamed(t *testing.T) {
	g := NewWithT(t)
	node, err := sim.NewNode("a", sim.VGPU, sim.VGPU)
	g.Expect(err).NotTo(HaveOccurred())
	shown := func() []v1alpha1.DeviceStatus { return plan.Reported(node.Observe().Devices) }

	g.Expect(shown()).To(HaveEach(And(HaveField("Virtual", true), HaveField("License", v1alpha1.LicenseStateLicensed))))
	g.Expect(licenseMissing(shown()).Status).To(Equal(metav1.ConditionFalse))

	node.GPUs[1].Unlicensed = true
	c := licenseMissing(shown())
	g.Expect(shown()[1].License).To(Equal(v1alpha1.LicenseStateUnlicensed))
	g.Expect(c.Status).To(Equal(metav1.ConditionTrue))
	g.Expect(c.Reason).To(Equal(v1alpha1.ReasonVGPUUnlicensed))
	g.Expect(c.Message).To(And(HavePrefix("GPU 1 (GRID-A100-20C): no vGPU license"), ContainSubstring("licensingConfig")))

	whole, err := sim.NewNode("a", sim.T4)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(plan.Reported(whole.Observe().Devices)[0].License).To(BeEmpty())
}
