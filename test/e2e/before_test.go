// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func beforeSpecs() {
	Describe("A policy that was there before the GPU Operator", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			p := &unstructured.Unstructured{}
			p.SetGroupVersionKind(gpuoperator.PolicyKind())
			p.SetName(gpuoperator.PolicyName)
			Expect(kube.Delete(ctx, p)).To(Succeed())
			DeferCleanup(func(ctx SpecContext) {
				if err := kube.Get(ctx, client.ObjectKeyFromObject(p), p); err != nil {
					Expect(kube.Create(ctx, clusterPolicy())).To(Succeed())
				}
				unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			})
			Eventually(offered).WithContext(ctx).Should(BeEmpty())
		})

		It("reports that no device plugin is there to configure", func(ctx SpecContext) {
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			Eventually(statusOf).WithContext(ctx).WithArguments("shared").Should(ContainSubstring("reason: " + v1alpha1.ReasonNoDevicePlugin))
		})

		It("takes effect once the GPU Operator is installed, and nobody labels or patches anything", func(ctx SpecContext) {
			Expect(kube.Create(ctx, clusterPolicy())).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			expectReady(ctx, "shared")
			startPod(ctx, "sliced", "nvidia.com/gpu", 1)
			expectRunning(ctx, "sliced")
		})
	})
}
