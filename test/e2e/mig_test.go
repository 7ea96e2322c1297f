// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// migCase is what the profiles of one product are called.
type migCase struct {
	title   string
	model   sim.Model
	product string
	// profiles of three, two and one compute slices
	large, middle, small string
}

func migCases() []migCase {
	return []migCase{
		{
			title: "on A100, whose MIG mode needs a reset", model: sim.A100, product: "NVIDIA-A100-SXM4-40GB",
			large: "3g.20gb", middle: "2g.10gb", small: "1g.5gb",
		},
		{
			title: "on H100, whose MIG mode does not", model: sim.H100, product: "NVIDIA-H100-80GB-HBM3",
			large: "3g.40gb", middle: "2g.20gb", small: "1g.10gb",
		},
	}
}

func migSpecs() {
	for _, c := range migCases() {
		Describe("MIG "+c.title, Ordered, Offset(1), func() { migSpecsOf(c) })
	}
}

// migSpecsOf are the specs of MIG on two GPUs of a product, from idle.
func migSpecsOf(c migCase) {
	whole := map[string]int64{"nvidia.com/gpu": 2}
	BeforeAll(func(ctx SpecContext) { begin(ctx, c.model, c.model) })

	It("mixed advertises each profile by its name, and a pod gets an instance", func(ctx SpecContext) {
		timed("from idle, with NVIDIA's programs configured once, to Ready in", func() {
			share(ctx, fmt.Sprintf(`{strategy: MIG, mig: {layouts: [{instances: [
				{profile: %s, count: 1}, {profile: %s, count: 1}, {profile: %s, count: 2}]}]}}`, c.large, c.middle, c.small))
			expectAllocatable(ctx, map[string]int64{
				"nvidia.com/mig-" + c.large: 2, "nvidia.com/mig-" + c.middle: 2, "nvidia.com/mig-" + c.small: 4,
			})
			expectReady(ctx, "shared")
		})
		startPod(ctx, "instance", resourceOf(c.large), 1)
		got := expectRunning(ctx, "instance")
		Expect(instances()).To(ContainElement(got.uuid()), "the instance is one that the driver has")
		Expect(got).To(beExactly(got.uuid()))
		Eventually(nodeLabels).WithContext(ctx).Should(And(
			HaveKeyWithValue("nvidia.com/mig.strategy", "mixed"),
			HaveKeyWithValue("nvidia.com/mig-"+c.small+".count", "4")))
	})

	It("keeps what runs, names it while it blocks, and goes on when it ends", func(ctx SpecContext) {
		startPod(ctx, "holder", resourceOf(c.large), 1)
		holds := expectRunning(ctx, "holder").uuid()
		share(ctx, `{strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g}]}}`)
		Eventually(func() error { return ready(ctx, "shared") }).WithContext(ctx).
			Should(MatchError(And(ContainSubstring("GPUInUse"), ContainSubstring("default/holder"))))
		Consistently(instances, "3s").Should(ContainElement(holds))
		stopPod(ctx, "holder")
		expectReady(ctx, "shared")
	})

	It("single advertises instances as nvidia.com/gpu", func(ctx SpecContext) {
		expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 14})
		startPod(ctx, "single", "nvidia.com/gpu", 1)
		Expect(expectRunning(ctx, "single").uuid()).To(HavePrefix("MIG-"))
		Eventually(nodeLabels).WithContext(ctx).Should(HaveKeyWithValue("nvidia.com/gpu.product", c.product+"-MIG-"+c.small))
	})

	It("shares instances by time-slicing, if the policy says so", func(ctx SpecContext) {
		share(ctx, fmt.Sprintf(`{strategy: MIG, mig: {layouts: [{instances: [
			{profile: %[1]s, count: 1}, {profile: %[2]s, count: 3, replicas: 4}]}]}}`, c.large, c.small))
		expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-" + c.large: 2, "nvidia.com/mig-" + c.small: 24})
		expectReady(ctx, "shared")
	})

	// An H100 loses MIG mode and instances, an A100 keeps its mode and loses its instances.
	It("is as it was before the device plugin offers anything, when the machine boots anew", func(ctx SpecContext) {
		share(ctx, `{strategy: MIG, mig: {layouts: [{fill: 1g}]}}`)
		want := map[string]int64{"nvidia.com/mig-" + c.small: 14}
		expectAllocatable(ctx, want)
		expectReady(ctx, "shared")
		crash(ctx)
		Expect(gpus.Reboot()).To(Succeed())
		Expect(instances()).To(BeEmpty())
		seen := watchOffered(ctx)
		boot(ctx)
		timed("from kubelet Ready to Ready again in", func() {
			expectAllocatable(ctx, want)
			expectReady(ctx, "shared")
		})
		Expect(instances()).To(HaveLen(14))
		Expect(seen()).To(HaveEach(BeElementOf(map[string]int64{}, want)), "nothing else was ever offered")
	})

	It("gives the GPUs back whole when the policy is deleted", func(ctx SpecContext) {
		unshare(ctx, whole)
		Eventually(instances).WithContext(ctx).Should(BeEmpty())
		startPod(ctx, "whole-again", "nvidia.com/gpu", 2)
		Expect(expectRunning(ctx, "whole-again").uuids()).To(HaveLen(2))
	})
}

func mixtureSpecs() {
	Describe("GPUs of one node that are shared differently", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) { begin(ctx, sim.A100, sim.A100, sim.A100, sim.A100) })

		It("lets a workload take several whole GPUs beside shared ones", func(ctx SpecContext) {
			share(ctx, `{strategy: MIG, mig: {layouts: [{gpus: {indexes: [0, 1]}, fill: 1g.5gb}]}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2, "nvidia.com/mig-1g.5gb": 14})
			expectReady(ctx, "shared")
			startPod(ctx, "several", "nvidia.com/gpu", 2)
			startPod(ctx, "small", "nvidia.com/mig-1g.5gb", 1)
			got := expectRunning(ctx, "several")
			Expect(got.uuids()).To(And(HaveLen(2), HaveEach(HavePrefix("GPU-"))))
			Expect(expectRunning(ctx, "small").uuid()).To(HavePrefix("MIG-"))
			stopPods(ctx)
		})

		It("shares whole GPUs beside shared instances, under one rule for their names and requests", func(ctx SpecContext) {
			share(ctx, `{strategy: MIG, mig: {
				layouts: [{gpus: {indexes: [0, 1]}, fill: 1g.5gb, replicas: 2}],
				wholeGPUs: {replicas: 4}}, advertise: {renameByDefault: true}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu.shared": 8, "nvidia.com/mig-1g.5gb.shared": 28})
			expectReady(ctx, "shared")
			startPod(ctx, "whole", "nvidia.com/gpu.shared", 1)
			startPod(ctx, "instance", "nvidia.com/mig-1g.5gb.shared", 1)
			Expect(expectRunning(ctx, "whole").uuid()).NotTo(ContainSubstring("MIG-"))
			Expect(expectRunning(ctx, "instance").uuid()).To(HavePrefix("MIG-"))
			startPod(ctx, "greedy", "nvidia.com/mig-1g.5gb.shared", 2)
			expectRefused(ctx, "greedy", "maximum request size for shared resources is 1; found 2")
			startPod(ctx, "old-name", "nvidia.com/gpu", 1)
			expectPending(ctx, "old-name", "Insufficient nvidia.com/gpu")
			Eventually(nodeLabels).WithContext(ctx).Should(And(
				HaveKeyWithValue("nvidia.com/gpu.replicas", "4"), HaveKeyWithValue("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-40GB"),
				HaveKeyWithValue("nvidia.com/mig-1g.5gb.replicas", "2"),
				HaveKeyWithValue("nvidia.com/mig-1g.5gb.product", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb")))
			stopPods(ctx)
		})

		It("keeps the names and serves requests for several replicas if the policy says so", func(ctx SpecContext) {
			share(ctx, `{strategy: MIG, mig: {
				layouts: [{gpus: {indexes: [0, 1]}, fill: 1g.5gb, replicas: 2}],
				wholeGPUs: {replicas: 3}}, advertise: {failRequestsGreaterThanOne: false}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 6, "nvidia.com/mig-1g.5gb": 28})
			expectReady(ctx, "shared")
			startPod(ctx, "two", "nvidia.com/mig-1g.5gb", 2)
			expectRunning(ctx, "two")
			Eventually(nodeLabels).WithContext(ctx).Should(And(
				HaveKeyWithValue("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-40GB-SHARED"),
				HaveKeyWithValue("nvidia.com/mig-1g.5gb.product", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED")))
		})
	})
}
