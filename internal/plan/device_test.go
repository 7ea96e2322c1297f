// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

func TestDeviceIsWhatTheAgentReported(t *testing.T) {
	g := NewWithT(t)
	got := plan.Device(v1alpha1.DeviceStatus{
		UUID: "GPU-1", Index: 3, Product: "NVIDIA-A100-SXM4-40GB", MemoryMiB: 40960, ComputeCapability: "8.0", MIGCapable: true,
		PendingMIGMode: v1alpha1.MIGModeDisabled, ComputeMode: v1alpha1.ComputeModeExclusiveProcess,
		Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled},
		Instances: []v1alpha1.InstanceStatus{
			{ID: 1, Profile: "3g.20gb", Start: 4, Size: 4, UUID: "MIG-1"},
			{ID: 2, Profile: "2g.10gb", Start: 0, Size: 2},
		},
		Profiles: []v1alpha1.ProfileStatus{{
			Name: "2g.10gb", ID: 14, Slices: 2, MemoryMiB: 9856, Max: 3, Size: 2, Starts: []int32{4, 0, 2},
		}},
		Processes: []v1alpha1.ProcessStatus{
			{PID: 10, Name: "python", Instance: new(int32(1)), PodUID: "pod", ContainerID: "container"},
			{PID: 11, Name: "nvidia-cuda-mps-server"},
		},
		Holders: []v1alpha1.HolderStatus{
			{Namespace: "user", Pod: "train", Container: "main", Instance: new(int32(0))},
			{Namespace: "user", Pod: "whole", Container: "main"},
		},
	})
	g.Expect(got).To(Equal(gpu.Device{
		UUID: "GPU-1", Index: 3, Product: "NVIDIA-A100-SXM4-40GB", MemoryMiB: 40960,
		ComputeCapability: gpu.ComputeCapability{Major: 8}, MIGCapable: true, PendingMIG: false,
		Profiles: []gpu.Profile{{Name: "2g.10gb", ID: 14, Slices: 2, MemoryMiB: 9856, Max: 3, Size: 2, Starts: []int{0, 2, 4}}},
		State: gpu.State{
			MIG: true, ComputeMode: gpu.ComputeExclusiveProcess,
			Instances: []gpu.Instance{
				{Profile: "2g.10gb", Placement: gpu.Placement{Start: 0, Size: 2}, ID: 2, Partial: true},
				{Profile: "3g.20gb", Placement: gpu.Placement{Start: 4, Size: 4}, ID: 1, UUID: "MIG-1"},
			},
		},
		Processes: []gpu.Process{
			{PID: 10, Name: "python", Instance: 1, PodUID: "pod", ContainerID: "container"},
			{PID: 11, Name: "nvidia-cuda-mps-server", Instance: gpu.WholeGPU, MPSServer: true},
		},
		Holders: []gpu.Holder{
			{Namespace: "user", Pod: "train", Container: "main", Instance: 0},
			{Namespace: "user", Pod: "whole", Container: "main", Instance: gpu.WholeGPU},
		},
	}))
}

func TestDeviceKnowsWhoRunsTheMPSDaemon(t *testing.T) {
	g := NewWithT(t)
	for owner, external := range map[v1alpha1.MPSDaemonOwner]bool{
		v1alpha1.MPSDaemonOwnerNVIDIA: true, v1alpha1.MPSDaemonOwnerGPUSharing: false,
	} {
		status := v1alpha1.DeviceStatus{UUID: "GPU-1", ComputeCapability: "unknown", Sharing: v1alpha1.DeviceSharing{
			MIGMode: v1alpha1.MIGModeDisabled,
			MPS:     &v1alpha1.MPSDaemon{Resource: "nvidia.com/gpu", Owner: owner, ActiveThreadPercentage: 25, PinnedMemoryLimitMiB: 4096},
		}}
		d := plan.Device(status)
		g.Expect(*d.State.MPS).To(Equal(gpu.MPSDaemon{
			Resource: "nvidia.com/gpu", External: external, ActiveThreadPercentage: 25, PinnedMemoryLimitMiB: 4096,
		}))
		g.Expect(d.ComputeCapability).To(BeZero())
		g.Expect(plan.Observed(d)).To(Equal(status.Sharing), "there and back")
	}
}
