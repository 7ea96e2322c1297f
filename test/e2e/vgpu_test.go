// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

func vgpuSpecs() {
	Describe("A vGPU guest", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) { begin(ctx, sim.VGPU) })

		It("shows as one, with its license", func(ctx SpecContext) {
			Eventually(gpuNode).WithContext(ctx).Should(HaveField("Status.Devices", ConsistOf(And(
				HaveField("Virtual", true), HaveField("License", v1alpha1.LicenseStateLicensed)))))
		})

		It("is named once it has no license, and no longer once it has one again", func(ctx SpecContext) {
			license(false)
			DeferCleanup(license, true)
			Eventually(licenseMissing).WithContext(ctx).Should(ContainSubstring("GPU 0 (GRID-A100-20C): no vGPU license"))
			Expect(kubectl(ctx, "", "gpusharing", "status")).To(ContainSubstring("virtual, without a license"))
			license(true)
			Eventually(licenseMissing).WithContext(ctx).Should(BeEmpty())
		})
	})
}

// license gives the vGPUs their license, or takes it.
func license(has bool) {
	GinkgoHelper()
	Expect(gpus.Update(func(s *simdriver.State) error {
		for i := range s.Node.GPUs {
			s.Node.GPUs[i].Unlicensed = !has
		}
		return nil
	})).To(Succeed())
}

func gpuNode(ctx context.Context) (*v1alpha1.GPUNode, error) {
	n := &v1alpha1.GPUNode{}
	return n, kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)
}

// licenseMissing is the message of the condition; empty: it is not true.
func licenseMissing(ctx context.Context) (string, error) {
	n, err := gpuNode(ctx)
	if err != nil {
		return "", err
	}
	c, _ := condition.Find(n.Status.Conditions, v1alpha1.ConditionLicenseMissing)
	return c.Message, nil
}
