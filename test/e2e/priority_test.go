// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// prioritySpecs prove on the one node what TestADefaultBesideAPolicyForSomeNodes in test/cluster proves on two.
func prioritySpecs() {
	Describe("A cluster-wide default and a policy for some nodes stand side by side:", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			DeferCleanup(func(ctx SpecContext) { unshare(ctx, map[string]int64{"nvidia.com/gpu": 2}) })
		})

		It("the default governs a node that no other policy selects", func(ctx SpecContext) {
			apply(ctx, "default", `{sharing: {strategy: MPS, mps: {replicas: 2}}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
			expectReady(ctx, "default")
		})

		It("the policy with the higher priority governs a node that both select, and the default reports the conflict", func(ctx SpecContext) {
			apply(ctx, "some", `{priority: 10, nodeSelector: {matchLabels: {kubernetes.io/hostname: node-a}}, sharing: {strategy: MPS, mps: {replicas: 4}}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			expectReady(ctx, "some")
			Eventually(conflicted).WithContext(ctx).WithArguments("default").Should(Equal(int32(1)))
		})

		It("the default governs the node again when the other policy goes", func(ctx SpecContext) {
			Expect(kube.Delete(ctx, &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "some"}})).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
			expectReady(ctx, "default")
		})
	})
}

// conflicted is the number of nodes that a policy selects and another governs.
func conflicted(ctx context.Context, policy string) (int32, error) {
	p := &v1alpha1.GPUSharingPolicy{}
	err := kube.Get(ctx, client.ObjectKey{Name: policy}, p)
	return p.Status.Nodes.Conflicted, err
}
