// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// noDevice is what the scheduler says of a pod if no device is left for it.
const noDevice = "cannot allocate all claims"

// migByHand makes MIG instances as an administrator does, on the node's second GPU.
func migByHand(profiles string) {
	GinkgoHelper()
	Expect(installed.SMI("mig", "-i", "1", "-cgi", profiles, "-C")).To(Succeed())
}

// migModeByHand changes the MIG mode of the node's second GPU, which needs a reset: nvidia-persistenced has the GPU
// open.
func migModeByHand(mode string) {
	GinkgoHelper()
	Expect(installed.SMI("-i", "1", "-mig", mode)).To(Succeed())
	Expect(installed.SMI("-i", "1", "-r")).To(Succeed())
}

// What follows is done without us: it shows that NVIDIA's DRA driver works on the node as its documentation says, so
// that what is proved of us later means something.
func draByHandSpecs() {
	Describe("NVIDIA's DRA driver alone, by hand", Ordered, Offset(1), func() {
		const class = "by-hand-mig-1g.5gb"

		BeforeAll(func(ctx SpecContext) {
			beginDRA(ctx, sim.A100, sim.A100)
			migModeByHand("1")
			migByHand("1g.5gb,1g.5gb")
			restartDRA(ctx)
		})
		AfterAll(func(ctx SpecContext) {
			stopPods(ctx)
			Expect(client.IgnoreNotFound(kube.Delete(ctx, migClass(class, "1g.5gb")))).To(Succeed())
			Expect(installed.SMI("mig", "-i", "1", "-dci")).To(Succeed())
			Expect(installed.SMI("mig", "-i", "1", "-dgi")).To(Succeed())
			migModeByHand("0")
			installDRA(ctx) // without shares
			restartDRA(ctx)
		})

		It("publishes GPUs and MIG instances, and nothing of them is in the node's allocatable", func(ctx SpecContext) {
			Expect(published(ctx)).To(And(HaveLen(3), Equal(devicesOfDriver(0))))
			Expect(allocatable(ctx)).To(BeEmpty())
		})

		It("gives an unchanged pod a whole GPU", func(ctx SpecContext) {
			startPod(ctx, "whole", "nvidia.com/gpu", 1)
			got := expectRunning(ctx, "whole")
			Expect(got).To(beExactly(allocatedUUID(ctx, "whole")))
		})

		It("gives unchanged pods MIG instances once a class has the name of their resource, and one more than there are stays Pending", func(ctx SpecContext) {
			startPod(ctx, "first", "nvidia.com/mig-1g.5gb", 1)
			expectPending(ctx, "first", "Insufficient nvidia.com/mig-1g.5gb")
			Expect(kube.Create(ctx, migClass(class, "1g.5gb"))).To(Succeed())
			Expect(expectRunning(ctx, "first")).To(beExactly(allocatedUUID(ctx, "first")))
			startPod(ctx, "second", "nvidia.com/mig-1g.5gb", 1)
			Expect(expectRunning(ctx, "second")).To(beExactly(allocatedUUID(ctx, "second")))
			Expect(allocatedUUID(ctx, "second")).NotTo(Equal(allocatedUUID(ctx, "first")))
			startPod(ctx, "third", "nvidia.com/mig-1g.5gb", 1)
			expectPending(ctx, "third", noDevice)
		})

		It("sees another instance only once its pod is deleted, and pods that run keep theirs", func(ctx SpecContext) {
			startPod(ctx, "keeps", "nvidia.com/mig-1g.5gb", 1)
			keeps := expectRunning(ctx, "keeps").uuid()
			before, err := published(ctx)
			Expect(err).NotTo(HaveOccurred())
			migByHand("2g.10gb")
			Consistently(published, 2*time.Second).WithContext(ctx).Should(Equal(before))
			restartDRA(ctx)
			Expect(published(ctx)).To(And(HaveLen(len(before)+1), HaveKey(HavePrefix("gpu-1-mig-2g10gb-"))))
			Expect(allocatedUUID(ctx, "keeps")).To(Equal(keeps))
			Expect(restarts(ctx)).To(HaveKeyWithValue(users+"/keeps/main", int32(0)))
		})

		It("lets as many pods share a GPU as it has shares", func(ctx SpecContext) {
			shareDRA(ctx, 4)
			for i := range 5 {
				startPod(ctx, holderName(i), "nvidia.com/gpu", 1)
			}
			expectSharing(ctx, map[string]int{"gpu-0": 4})
		})
	})
}

// expectSharing waits until so many users' pods run on each device, and all others wait for one.
func expectSharing(ctx context.Context, want map[string]int) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		pods := &corev1.PodList{}
		g.Expect(kube.List(ctx, pods, client.InNamespace(users))).To(Succeed())
		devices, err := allocated(ctx)
		g.Expect(err).NotTo(HaveOccurred())
		running := map[string]int{}
		for i := range pods.Items {
			p := &pods.Items[i]
			if p.Status.Phase != corev1.PodRunning {
				g.Expect(state(p)).To(And(HavePrefix(string(corev1.PodPending)), ContainSubstring(noDevice)))
				continue
			}
			g.Expect(devices[p.Name]).To(HaveLen(1))
			running[devices[p.Name][0]]++
		}
		g.Expect(running).To(Equal(want))
	}).WithContext(ctx).Should(Succeed())
}
