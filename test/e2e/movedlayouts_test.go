// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// movedLayoutSpecs: layouts move between GPUs, so that the node offers as much as before, beside a kubelet that publishes as often as Kubernetes' does by default.
func movedLayoutSpecs() {
	Describe("A layout that moves between GPUs", Ordered, Offset(1), func() {
		const layouts = `{strategy: MIG, mig: {layouts: [{gpus: {indexes: [%d]}, fill: 7g}, {gpus: {indexes: [%d]}, fill: 3g}]}}`
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			Expect(machine.PublishEvery(ctx, 10*time.Second)).To(Succeed())
			DeferCleanup(func(ctx SpecContext) error { return machine.PublishEvery(ctx, statusEvery()) })
		})

		It("has the kubelet refuse no pod that waited for it", func(ctx SpecContext) {
			want := map[string]int64{"nvidia.com/mig-7g.40gb": 1, "nvidia.com/mig-3g.20gb": 2}
			share(ctx, fmt.Sprintf(layouts, 0, 1))
			expectAllocatable(ctx, want)
			expectReady(ctx, "shared")
			var says []string
			for n := range 4 {
				share(ctx, fmt.Sprintf(layouts, (n+1)%2, n%2))
				Eventually(func(g Gomega) {
					node := &corev1.Node{}
					g.Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, node)).To(Succeed())
					g.Expect(node.Spec.Taints).NotTo(BeEmpty())
				}).WithContext(ctx).WithPolling(50 * time.Millisecond).Should(Succeed())
				name := fmt.Sprint("waits-", n)
				startPod(ctx, name, "nvidia.com/mig-3g.20gb", 1)
				Eventually(func(g Gomega) {
					pod := &corev1.Pod{}
					g.Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, pod)).To(Succeed())
					g.Expect(pod.Status.Phase).NotTo(Equal(corev1.PodPending), "%s", state(pod))
					if pod.Status.Phase == corev1.PodFailed {
						says = append(says, fmt.Sprintf("%s: %s", pod.Status.Reason, pod.Status.Message))
					}
				}).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Succeed())
				stopPods(ctx)
				expectReady(ctx, "shared")
			}
			Expect(says).To(BeEmpty(), "of 4 pods that waited for a change, %d were refused", len(says))
		})
	})
}
