// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// Programs that are no user's have GPUs and MIG devices open, which NVML lists as no process.
func openSpecs() {
	const (
		halves = `{strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 3g.20gb}]}}`
		thirds = `{strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 2g.10gb}]}}`
		both   = `{strategy: MIG, mig: {layouts: [{fill: 2g.10gb}]}}`
	)
	Describe("A GPU that another program has open", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			share(ctx, halves)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-3g.20gb": 2})
			expectReady(ctx, "shared")
		})

		It("as DCGM holds MIG devices changes once DCGM has ended, and DCGM then holds the new ones", func(ctx SpecContext) {
			now, err := instances()
			Expect(err).NotTo(HaveOccurred())
			Eventually(held).WithContext(ctx).Should(ConsistOf(now))
			share(ctx, thirds)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-2g.10gb": 3})
			expectReady(ctx, "shared")
			now, err = instances()
			Expect(err).NotTo(HaveOccurred())
			Eventually(held).WithContext(ctx).Should(ConsistOf(now))
		})

		It("for a moment, as node-status-exporter does, is reset a moment later", func(ctx SpecContext) {
			Expect(os.RemoveAll(callsLog())).To(Succeed())
			c, err := gpus.Connect()
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(func() { _ = c.Disconnect() }) // it may be closed
			share(ctx, both)
			Eventually(resets).WithContext(ctx).Should(ContainElement(HaveSuffix("IN_USE")))
			Expect(c.Disconnect()).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-2g.10gb": 6})
			expectReady(ctx, "shared")
		})

		It("outside of Kubernetes blocks a change, which says so and goes on when the program ends", func(ctx SpecContext) {
			c, err := gpus.Connect()
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(func() { _ = c.Disconnect() }) // it may be closed
			Expect(c.HoldInstances()).To(Succeed())
			before, err := instances()
			Expect(err).NotTo(HaveOccurred())
			share(ctx, halves)
			Eventually(statusOf).WithContext(ctx).WithArguments("shared").Should(ContainSubstring("IN_USE"))
			Expect(instances()).To(ContainElements(before))
			Expect(c.Disconnect()).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-3g.20gb": 2})
			expectReady(ctx, "shared")
		})
	})
}

// held are the MIG devices to which programs have handles.
func held() ([]string, error) {
	clients, err := gpus.Connected()
	var found []string
	for _, c := range clients {
		found = append(found, c.Instances...)
	}
	return found, err
}
