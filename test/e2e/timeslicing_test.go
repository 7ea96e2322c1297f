// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

func timeSlicingSpecs() {
	Describe("Time-slicing", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) { begin(ctx, sim.A100, sim.A100) })

		It("advertises each GPU as often as the policy says", func(ctx SpecContext) {
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			timed("first policy, which restarts NVIDIA's programs once, to Ready in", func() {
				expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
				expectReady(ctx, "shared")
			})
			Eventually(nodeLabels).WithContext(ctx).Should(And(
				HaveKeyWithValue("nvidia.com/gpu.replicas", "4"), HaveKeyWithValue("nvidia.com/gpu.sharing-strategy", "time-slicing")))
		})

		It("runs as many pods as there are replicas, and keeps one more Pending", func(ctx SpecContext) {
			visible := map[string]int{}
			for i := range 8 {
				startPod(ctx, fmt.Sprintf("shared-%d", i), "nvidia.com/gpu", 1)
			}
			for i := range 8 {
				visible[expectRunning(ctx, fmt.Sprintf("shared-%d", i)).uuid()]++
			}
			Expect(visible).To(HaveLen(2), "both GPUs are used")
			Expect(visible).To(HaveEach(4))
			startPod(ctx, "one-more", "nvidia.com/gpu", 1)
			expectPending(ctx, "one-more", "Insufficient nvidia.com/gpu")
		})

		It("refuses a pod that asks for two replicas, as the policy's default says", func(ctx SpecContext) {
			startPod(ctx, "greedy", "nvidia.com/gpu", 2)
			expectRefused(ctx, "greedy", "maximum request size for shared resources is 1; found 2")
		})

		It("follows edits of replicas in a row without a restart of any container of NVIDIA's or of a user's", func(ctx SpecContext) {
			startPod(ctx, "witness", "nvidia.com/gpu", 1)
			expectRunning(ctx, "witness")
			before := expectSettled(ctx)
			timed(fmt.Sprintf("%d edits in", edits), func() {
				for i := range edits {
					replicas := 2 + i%7
					share(ctx, fmt.Sprintf(`{strategy: TimeSlicing, timeSlicing: {replicas: %d}}`, replicas))
					expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": int64(2 * replicas)})
				}
			})
			expectReady(ctx, "shared")
			Expect(restarts(ctx)).To(Equal(before))
		}, NodeTimeout(20*time.Minute))

		It("sets the interval at once, beside running pods, and restores the former one", func(ctx SpecContext) {
			startPod(ctx, "takes-turns", "nvidia.com/gpu", 1)
			expectRunning(ctx, "takes-turns")
			before := expectSettled(ctx)
			setByHand(gpu.TimeSliceMedium)
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4, interval: Short}}`)
			Eventually(timeSlices).WithContext(ctx).Should(HaveEach(gpu.TimeSliceShort))
			expectReady(ctx, "shared")
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			Eventually(timeSlices).WithContext(ctx).Should(HaveEach(gpu.TimeSliceMedium))
			expectReady(ctx, "shared")
			Expect(restarts(ctx)).To(Equal(before))
		})

		It("advertises replicas under another name if the policy says so, and takes the old name away", func(ctx SpecContext) {
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 3}, advertise: {renameByDefault: true}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu.shared": 6})
			expectReady(ctx, "shared")
			Eventually(nodeLabels).WithContext(ctx).Should(HaveKeyWithValue("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-40GB"))
			startPod(ctx, "renamed", "nvidia.com/gpu.shared", 1)
			expectRunning(ctx, "renamed")
			startPod(ctx, "old-name", "nvidia.com/gpu", 1)
			expectPending(ctx, "old-name", "Insufficient nvidia.com/gpu")
		})
	})
}

// setByHand sets the time slice of each GPU, as an administrator does by nvidia-smi compute-policy.
func setByHand(slice gpu.TimeSlice) {
	GinkgoHelper()
	Expect(gpus.Update(func(s *simdriver.State) error {
		for i := range s.Node.GPUs {
			if err := s.Node.SetTimeSlice(s.Node.GPUs[i].UUID, slice); err != nil {
				return err
			}
		}
		return nil
	})).To(Succeed())
}

// timeSlices are those of the GPUs, as the driver has them.
func timeSlices(g Gomega) []gpu.TimeSlice {
	n, err := gpus.Node()
	g.Expect(err).NotTo(HaveOccurred())
	var all []gpu.TimeSlice
	for i := range n.GPUs {
		slice, err := n.TimeSlice(n.GPUs[i].UUID)
		g.Expect(err).NotTo(HaveOccurred())
		all = append(all, slice)
	}
	return all
}

func exclusiveSpecs() {
	Describe("Exclusive", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) { resume(ctx, sim.A100, sim.A100) })

		It("gives every pod a whole GPU", func(ctx SpecContext) {
			share(ctx, `{strategy: Exclusive}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
			expectReady(ctx, "shared")
			startPod(ctx, "both", "nvidia.com/gpu", 2)
			Expect(expectRunning(ctx, "both").uuids()).To(HaveLen(2))
		})
	})
}
