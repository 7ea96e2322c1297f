// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
)

func lifecycleSpecs() {
	Describe("The operator itself", Ordered, Offset(1), func() {
		const release = "gpu-sharing-operator"
		shared := map[string]int64{"nvidia.com/gpu": 8}

		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			share(ctx, `{strategy: MPS, mps: {replicas: 4}}`)
			expectAllocatable(ctx, shared)
			expectReady(ctx, "shared")
		})

		It("is upgraded by Helm without a word to what runs: clients of MPS keep their daemon", func(ctx SpecContext) {
			startPod(ctx, "client", "nvidia.com/gpu", 1)
			expectRunning(ctx, "client")
			before, err := restarts(ctx)
			Expect(err).NotTo(HaveOccurred())
			daemons := podUIDs(ctx, "gpu-sharing-mps")
			agents := podUIDs(ctx, "gpu-sharing-agent")
			helm(ctx, "upgrade", release, "config/helm", "--namespace", operatorNamespace, "--set", "logLevel=debug")
			Eventually(func() []string { return podUIDs(ctx, "gpu-sharing-agent") }).WithContext(ctx).ShouldNot(Or(BeEmpty(), Equal(agents)))
			Eventually(func() ([]string, error) { return notReady(ctx, operatorNamespace) }).WithContext(ctx).Should(BeEmpty())
			expectReady(ctx, "shared")
			Expect(podUIDs(ctx, "gpu-sharing-mps")).To(Equal(daemons))
			Expect(offered(ctx)).To(Equal(shared))
			Expect(restarts(ctx)).To(Equal(before))
		})

		It("is uninstalled by Helm and leaves what is offered and what runs; installed again it goes on", func(ctx SpecContext) {
			startPod(ctx, "client", "nvidia.com/gpu", 1)
			expectRunning(ctx, "client")
			before, err := restarts(ctx)
			Expect(err).NotTo(HaveOccurred())
			helm(ctx, "uninstall", release, "--namespace", operatorNamespace)
			Eventually(func() []string { return podUIDs(ctx, "gpu-sharing-agent") }).WithContext(ctx).Should(BeEmpty())
			Eventually(func() []string { return podUIDs(ctx, "gpu-sharing-controller") }).WithContext(ctx).Should(BeEmpty())
			Consistently(offered, "3s").WithContext(ctx).Should(Equal(shared))
			Expect(restarts(ctx)).To(Equal(before))
			installOperator(ctx)
			expectReady(ctx, "shared")
			Expect(restarts(ctx)).To(Equal(before))
			stopPod(ctx, "client")
			share(ctx, `{strategy: MPS, mps: {replicas: 5}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 10})
			expectReady(ctx, "shared")
		})
	})
}

// podUIDs are the UIDs of the operator's pods of a name, in the order of the pods' names.
func podUIDs(ctx SpecContext, name string) []string {
	GinkgoHelper()
	pods := &corev1.PodList{}
	Expect(kube.List(ctx, pods, client.InNamespace(operatorNamespace), client.MatchingLabels{"app.kubernetes.io/name": name})).To(Succeed())
	var uids []string
	for i := range pods.Items {
		uids = append(uids, string(pods.Items[i].UID))
	}
	return uids
}
