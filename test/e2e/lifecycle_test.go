// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const (
	// release is what the README calls the operator's release.
	release = "gpu-sharing-operator"
	// checkName is the pod of `helm test`.
	checkName = "gpu-sharing-check"
)

func lifecycleSpecs() {
	Describe("The operator itself", Ordered, Offset(1), func() {
		shared := map[string]int64{"nvidia.com/gpu": 8}

		BeforeAll(func(ctx SpecContext) {
			resume(ctx, sim.A100, sim.A100)
			share(ctx, `{strategy: MPS, mps: {replicas: 4}}`)
			expectAllocatable(ctx, shared)
			expectReady(ctx, "shared")
		})

		It("finds nothing missing by helm test, which leaves nothing", func(ctx SpecContext) {
			helm(ctx, "test", release, "--namespace", operatorNamespace)
			Expect(podUIDs(ctx, checkName)).To(BeEmpty())
		})

		It("is upgraded by Helm without a word to what runs: clients of MPS keep their daemon", func(ctx SpecContext) {
			startPod(ctx, "client", "nvidia.com/gpu", 1)
			expectRunning(ctx, "client")
			before := expectSettled(ctx)
			daemons, err := podUIDs(ctx, "gpu-sharing-mps")
			Expect(err).NotTo(HaveOccurred())
			agents, err := podUIDs(ctx, "gpu-sharing-agent")
			Expect(err).NotTo(HaveOccurred())
			upgradeOperator(ctx, "logLevel=debug")
			expectOtherAgents(ctx, agents)
			expectReady(ctx, "shared")
			Expect(podUIDs(ctx, "gpu-sharing-mps")).To(Equal(daemons))
			Expect(offered(ctx)).To(Equal(shared))
			Expect(restarts(ctx)).To(Equal(before))
		})

		It("is uninstalled by Helm and leaves what is offered and what runs; installed again it goes on", func(ctx SpecContext) {
			startPod(ctx, "client", "nvidia.com/gpu", 1)
			expectRunning(ctx, "client")
			before := expectSettled(ctx)
			helm(ctx, "uninstall", release, "--namespace", operatorNamespace)
			for _, name := range []string{"gpu-sharing-agent", "gpu-sharing-controller"} {
				Eventually(podUIDs).WithContext(ctx).WithArguments(name).Should(BeEmpty())
			}
			Consistently(offered, "3s").WithContext(ctx).Should(Equal(shared))
			Expect(restarts(ctx)).To(Equal(before))
			releaseLease(ctx) // Helm took the right to do it before they had ended
			installOperator(ctx)
			expectReady(ctx, "shared")
			Expect(restarts(ctx)).To(Equal(before))
			stopPod(ctx, "client")
			share(ctx, `{strategy: MPS, mps: {replicas: 5}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 10})
			expectReady(ctx, "shared")
		})
	})

	Describe("The operator with live policies", Ordered, Offset(1), func() {
		It("restores everything by kubectl gpusharing restore, so that Helm uninstalls it and nothing else changes", func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			before := settled(ctx)
			apply(ctx, "partitioned", `{priority: 10, sharing: {strategy: MIG, mig: {
				layouts: [{gpus: {indexes: [0]}, instances: [{profile: 3g.20gb, count: 1}, {profile: 1g.5gb, count: 3}]}, {gpus: {indexes: [1]}, fill: 2g.10gb}]}}}`)
			share(ctx, `{strategy: MPS, mps: {replicas: 4}}`) // that governs no node, but would once the other is deleted
			expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb": 3, "nvidia.com/mig-2g.10gb": 3})
			expectReady(ctx, "partitioned")

			Expect(kubectl(ctx, "", "gpusharing", "restore", "--yes", "--timeout", patience.String())).To(ContainSubstring("Restored: "))
			policies := &v1alpha1.GPUSharingPolicyList{}
			Expect(kube.List(ctx, policies)).To(Succeed())
			Expect(policies.Items).To(BeEmpty())
			Eventually(look).WithContext(ctx).Should(BeComparableTo(before), "restored while the operator runs, also what NVIDIA's programs set once they have read it")
			expectOperandsReady(ctx)
			Eventually(ending).WithContext(ctx).Should(BeEmpty())
			restored, err := restarts(ctx)
			Expect(err).NotTo(HaveOccurred())

			helm(ctx, "uninstall", release, "--namespace", operatorNamespace)
			for _, name := range []string{"gpu-sharing-agent", "gpu-sharing-controller"} {
				Eventually(podUIDs).WithContext(ctx).WithArguments(name).Should(BeEmpty())
			}
			Consistently(look, "3s").WithContext(ctx).Should(BeComparableTo(before))
			Expect(restarts(ctx)).To(Equal(restored))
			releaseLease(ctx) // Helm took the right to do it before they had ended
			installOperator(ctx)
		})
	})
}

// expectOtherAgents waits until others run in place of these agents, and all of the operator's pods are Ready.
func expectOtherAgents(ctx context.Context, old []string) {
	GinkgoHelper()
	Eventually(podUIDs).WithContext(ctx).WithArguments("gpu-sharing-agent").ShouldNot(Or(BeEmpty(), ContainElements(old)))
	Eventually(func() ([]string, error) { return notReady(ctx, operatorNamespace) }).WithContext(ctx).Should(BeEmpty())
}

// podUIDs are the UIDs of the operator's pods of a name, in the order of the pods' names.
func podUIDs(ctx context.Context, name string) ([]string, error) {
	pods := &corev1.PodList{}
	err := kube.List(ctx, pods, client.InNamespace(operatorNamespace), client.MatchingLabels{"app.kubernetes.io/name": name})
	var uids []string
	for i := range pods.Items {
		uids = append(uids, string(pods.Items[i].UID))
	}
	return uids, err
}
