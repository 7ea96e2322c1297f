// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

func TestAGPUWithUnknownMemoryIsSharedWithoutAMemoryLimit(t *testing.T) {
	g := NewWithT(t)
	gb10 := gpu.Device{UUID: "GPU-a", Product: "NVIDIA GB10", ComputeCapability: gpu.ComputeCapability{Major: 12, Minor: 1}}
	devices, err := plan.Resolve(mps(v1alpha1.MPS{Replicas: 4}), []gpu.Device{gb10})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(devices[0].Sharing.MPS.PinnedMemoryLimit).To(BeNil())
	steps, err := plan.Node(devices, []gpu.Device{gb10})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(steps[1].String()).To(HaveSuffix("start MPS for nvidia.com/gpu, each client 25% of the threads and no memory limit"))

	gb10.State = gpu.State{
		ComputeMode: gpu.ComputeExclusiveProcess, MPS: &gpu.MPSDaemon{Resource: plan.ResourceGPU, ActiveThreadPercentage: 25},
	}
	g.Expect(plan.Same(plan.Observed(gb10), devices[0].Sharing)).To(BeTrue())
	g.Expect(plan.Node(devices, []gpu.Device{gb10})).To(BeEmpty())

	devices, err = plan.Resolve(mps(v1alpha1.MPS{Replicas: 4, PinnedMemoryLimit: new(resource.MustParse("4Gi"))}), []gpu.Device{gb10})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(devices[0].Sharing.MPS.PinnedMemoryLimit.String()).To(Equal("4Gi"), "one that the policy names is set")
}

func TestOneServerForAllUsersNeedsVolta(t *testing.T) {
	g := NewWithT(t)
	d := gpu.Device{UUID: "GPU-a", Product: "Tesla P100", MemoryMiB: 16384, ComputeCapability: gpu.ComputeCapability{Major: 6}}
	_, err := plan.Resolve(mps(v1alpha1.MPS{Replicas: 2, MultiUser: new(true)}), []gpu.Device{d})
	g.Expect(err).To(MatchError(&plan.Problem{Reason: v1alpha1.ReasonMPSMultiUserNotSupported, Message: "GPU 0 (Tesla-P100) has compute capability " +
		"6.0, and sharing.mps.multiUser needs 7.0 (Volta) or newer; remove multiUser, or leave the GPU's node out of the policy"}))
	d.ComputeCapability.Major = 7
	devices, err := plan.Resolve(mps(v1alpha1.MPS{Replicas: 2, MultiUser: new(true)}), []gpu.Device{d})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(devices[0].Sharing.MPS.MultiUser).To(BeTrue())
}
