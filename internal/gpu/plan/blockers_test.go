// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// A driver whose lists of processes are wrong does not tell whether a GPU is idle.
func TestGPUsOfUnknownProcessesAreNotDisturbed(t *testing.T) {
	disruptive := map[string]v1alpha1.DeviceSharing{
		"MIG": split(count("1g.5gb", 1)), "MPS": served(plan.ResourceGPU, 25, 3840),
	}
	for name, desired := range disruptive {
		t.Run(name, func(t *testing.T) {
			have := observed(t, sim.A100)
			have[0].ProcessesUnknown = true
			steps, err := plan.Node([]v1alpha1.DeviceSpec{{UUID: have[0].UUID, Sharing: desired}}, have)
			isProblem(t, err, v1alpha1.ReasonProcessesUnknown, "GPU 0 (NVIDIA-A100-SXM4-40GB): the driver does not report which "+
				"processes use the GPU, so that changing it could end them; update the driver (versions 535.43.02 to 535.86.05 "+
				"have this defect, and a version in another form may)")
			NewWithT(t).Expect(steps).To(BeEmpty())
		})
	}
	t.Run("what is so stays so", func(t *testing.T) {
		g := NewWithT(t)
		have := observed(t, sim.A100)
		have[0].ProcessesUnknown = true
		g.Expect(plan.Node([]v1alpha1.DeviceSpec{{UUID: have[0].UUID, Sharing: whole()}}, have)).To(BeEmpty())
	})
}

// GPUs that cannot be left out of a reset must be idle for it.
func TestAResetNeedsItsPeersIdle(t *testing.T) {
	g := NewWithT(t)
	have := observed(t, sim.A100, sim.A100, sim.A100)
	have[0].ResetPeers = []string{have[2].UUID}
	for i := range have {
		have[i].Holders = []gpu.Holder{{Namespace: "ml", Pod: "train", Container: "main", Instance: gpu.WholeGPU}}
	}
	steps, err := plan.Node([]v1alpha1.DeviceSpec{{UUID: have[0].UUID, Sharing: split(count("1g.5gb", 1))}}, have)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(plan.GPUs(steps[0])).To(Equal([]string{have[0].UUID, have[2].UUID}))
	blocked := make([]string, 0, 2)
	for _, b := range plan.Blockers(steps[0], have) {
		blocked = append(blocked, b.UUID)
	}
	g.Expect(blocked).To(Equal([]string{have[0].UUID, have[2].UUID}))
}

// An MPS server holds its GPU, also where another GPU changes.
func TestMPSOnAPeerStopsForAReset(t *testing.T) {
	g := NewWithT(t)
	have := observed(t, sim.A100, sim.A100, sim.A100)
	have[0].ResetPeers = []string{have[2].UUID}
	for i := 1; i < 3; i++ {
		have[i].State.MPS = &gpu.MPSDaemon{Resource: plan.ResourceGPU, ActiveThreadPercentage: 25, PinnedMemoryLimitMiB: 3840}
		have[i].State.ComputeMode = gpu.ComputeExclusiveProcess
	}
	desired := []v1alpha1.DeviceSpec{{UUID: have[0].UUID, Sharing: split(count("1g.5gb", 1))}}
	steps, err := plan.Node(desired, have)
	g.Expect(err).NotTo(HaveOccurred())
	const both = "GPU 1 (NVIDIA-A100-SXM4-40GB) and GPU 2 (NVIDIA-A100-SXM4-40GB): "
	g.Expect(steps[0].String()).To(Equal(both + "stop MPS for nvidia.com/gpu"))
	g.Expect(steps[len(steps)-1].String()).To(HavePrefix(both + "start MPS for nvidia.com/gpu"))

	have[0].ResetPeers = nil
	steps, err = plan.Node(desired, have)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(steps[0].String()).To(ContainSubstring("enable MIG mode"), "without a peer it is left alone")
}
