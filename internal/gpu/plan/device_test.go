// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

func TestAReportedGPUIsPlannedAsTheHardware(t *testing.T) {
	s := v1alpha1.DeviceStatus{
		UUID: "GPU-1", Index: 3, Product: "NVIDIA-A100-SXM4-40GB", MemoryMiB: 40960, ComputeCapability: "8.0", MIGCapable: true,
		PendingMIGMode: v1alpha1.MIGModeDisabled,
		Sharing:        v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled},
		Instances: []v1alpha1.InstanceStatus{
			{ID: 9, Profile: "1g.5gb", Start: 2, Size: 1},
			{ID: 7, Profile: "1g.5gb", Start: 0, Size: 1, UUID: "MIG-1"},
		},
		Profiles: []v1alpha1.ProfileStatus{
			{Name: "1g.5gb", ID: 19, Slices: 1, MemoryMiB: 4864, Max: 7, Size: 1, Starts: []int32{2, 0, 1}},
		},
		Processes: []v1alpha1.ProcessStatus{
			{PID: 1, Name: "nvidia-cuda-mps-server"}, {PID: 2, Name: "python", Instance: new(int32(7)), PodUID: "p", ContainerID: "c"},
		},
		Holders: []v1alpha1.HolderStatus{{Namespace: "a", PodName: "b", ContainerName: "c", Instance: new(int32(7))}, {PodName: "d"}},
	}
	NewWithT(t).Expect(plan.Device(s)).To(Equal(gpu.Device{
		UUID: "GPU-1", Index: 3, Product: "NVIDIA-A100-SXM4-40GB", MemoryMiB: 40960,
		ComputeCapability: gpu.ComputeCapability{Major: 8}, MIGCapable: true,
		State: gpu.State{MIG: true, Instances: []gpu.Instance{
			{Profile: "1g.5gb", ID: 7, UUID: "MIG-1", Placement: gpu.Placement{Start: 0, Size: 1}},
			{Profile: "1g.5gb", ID: 9, Partial: true, Placement: gpu.Placement{Start: 2, Size: 1}},
		}},
		Profiles: []gpu.Profile{{Name: "1g.5gb", ID: 19, Slices: 1, MemoryMiB: 4864, Max: 7, Size: 1, Starts: []int{0, 1, 2}}},
		Processes: []gpu.Process{
			{PID: 1, Name: "nvidia-cuda-mps-server", Instance: gpu.WholeGPU, MPSServer: true},
			{PID: 2, Name: "python", Instance: 7, PodUID: "p", ContainerID: "c"},
		},
		Holders: []gpu.Holder{
			{Namespace: "a", Pod: "b", Container: "c", Instance: 7}, {Pod: "d", Instance: gpu.WholeGPU},
		},
	}))
}

func TestAReportedDaemonAndComputeMode(t *testing.T) {
	g := NewWithT(t)
	for reported, want := range map[v1alpha1.ComputeMode]gpu.ComputeMode{
		"": gpu.ComputeDefault, v1alpha1.ComputeModeDefault: gpu.ComputeDefault,
		v1alpha1.ComputeModeProhibited: gpu.ComputeProhibited, v1alpha1.ComputeModeExclusiveProcess: gpu.ComputeExclusiveProcess,
	} {
		g.Expect(plan.Device(v1alpha1.DeviceStatus{ComputeMode: reported}).State.ComputeMode).To(Equal(want), string(reported))
	}
	for _, owner := range []v1alpha1.MPSDaemonOwner{v1alpha1.MPSDaemonOwnerGPUSharing, v1alpha1.MPSDaemonOwnerNVIDIA} {
		s := served(plan.ResourceGPU, 10, 1000)
		s.MPS.Owner = owner
		d := plan.Device(v1alpha1.DeviceStatus{Sharing: s, ComputeCapability: "unknown"})
		g.Expect(plan.Observed(d)).To(Equal(s))
		g.Expect(d.ComputeCapability.AtLeast(0, 1)).To(BeFalse())
	}
}

func TestReportedGPUsAreOrderedByIndex(t *testing.T) {
	devices := plan.Devices([]v1alpha1.DeviceStatus{{UUID: "b", Index: 1}, {UUID: "a"}})
	NewWithT(t).Expect(devices).To(HaveLen(2))
	NewWithT(t).Expect(devices[0].UUID).To(Equal("a"))
}
