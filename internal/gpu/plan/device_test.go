// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
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
	NewWithT(t).Expect(plan.Devices([]v1alpha1.DeviceStatus{s})[0]).To(Equal(gpu.Device{
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
		g.Expect(plan.Devices([]v1alpha1.DeviceStatus{{ComputeMode: reported}})[0].State.ComputeMode).To(Equal(want), string(reported))
	}
	for _, owner := range []v1alpha1.MPSDaemonOwner{v1alpha1.MPSDaemonOwnerGPUSharing, v1alpha1.MPSDaemonOwnerNVIDIA} {
		s := served(plan.ResourceGPU, 10, 1000)
		s.MPS.Owner = owner
		d := plan.Devices([]v1alpha1.DeviceStatus{{Sharing: s, ComputeCapability: "unknown"}})[0]
		g.Expect(plan.Observed(d)).To(Equal(s))
		g.Expect(d.ComputeCapability.AtLeast(0, 1)).To(BeFalse())
	}
}

// TestAReportLeavesOutKnownProfiles: what Reported leaves out, Devices finds again, whatever GPUs stand beside one another. A list of profiles is
// reported once at most for each product, and not at all if the catalogue has it.
func TestAReportLeavesOutKnownProfiles(t *testing.T) {
	g := NewWithT(t)
	known := gpu.Device{Product: "NVIDIA-A100-SXM4-40GB", MIGCapable: true}
	listed, found := catalogue.Find(known.Product)
	g.Expect(found).To(BeTrue())
	known.Profiles = listed.Profiles
	older := known // a driver that has fewer of them
	older.Profiles = known.Profiles[:2]
	silent := known // a driver that tells them in MIG mode only
	silent.Profiles = nil
	unknown := gpu.Device{Product: "NVIDIA-Z999", MIGCapable: true, Profiles: known.Profiles[1:]}
	without := gpu.Device{Product: "Tesla-T4"}
	kinds := []gpu.Device{known, older, silent, unknown, without}
	same := func(a, b gpu.Profile) bool { return reflect.DeepEqual(a, b) }

	for n := range 5 * 5 * 5 * 5 {
		var devices []gpu.Device
		for left, i := n, 0; i < 4; left, i = left/len(kinds), i+1 {
			d := kinds[left%len(kinds)]
			d.Index, d.UUID = i, fmt.Sprint(i)
			devices = append(devices, d)
		}
		reported := plan.Reported(devices)
		for i, d := range plan.Devices(reported) {
			g.Expect(slices.EqualFunc(d.Profiles, devices[i].Profiles, same)).To(BeTrue(), "GPU %d of %+v", i, reported)
		}
		full := plan.WithProfiles(reported)
		for i := range full {
			g.Expect(full[i].Profiles).To(HaveLen(len(devices[i].Profiles)))
		}
	}
	g.Expect(plan.Reported([]gpu.Device{known, known})[1].Profiles).To(BeEmpty())
	g.Expect(plan.Reported([]gpu.Device{known, known})[0].Profiles).To(BeEmpty())
	twice := plan.Reported([]gpu.Device{unknown, unknown})
	g.Expect(twice[0].Profiles).To(HaveLen(len(unknown.Profiles)))
	g.Expect(twice[1].Profiles).To(BeEmpty())
}

// TestAGPUNodeStaysBelow256KiB: with 16 GPUs of 7 instances each, of a product that the catalogue does not have, and users with the longest names
// that Kubernetes allows, on a node that is in the middle of a change.
func TestAGPUNodeStaysBelow256KiB(t *testing.T) {
	g := NewWithT(t)
	const gpus, instances, users = 16, 7, 100
	long := func(n, i int) string { return fmt.Sprintf("%0*d", n, i) }
	listed, found := catalogue.Find("NVIDIA-A100-SXM4-40GB")
	g.Expect(found).To(BeTrue())
	var devices []gpu.Device
	for i := range gpus {
		d := gpu.Device{
			Index: i, UUID: "GPU-" + long(36, i), Product: "NVIDIA " + long(80, 0), MIGCapable: true, Profiles: listed.Profiles[1:], MemoryMiB: 1 << 20,
			State: gpu.State{MIG: true},
		}
		for p := range gpus {
			d.ResetPeers = append(d.ResetPeers, "GPU-"+long(36, p))
		}
		for n := range instances {
			d.State.Instances = append(d.State.Instances, gpu.Instance{
				ID: n, Profile: long(32, 0), UUID: "MIG-" + long(36, n), Placement: gpu.Placement{Start: n, Size: 1},
			})
		}
		for n := range users {
			id := max(n-users+instances, 0) // whose user is listed last is no less in use
			d.Holders = append(d.Holders, gpu.Holder{Namespace: long(63, n), Pod: long(253, n), Container: long(63, n), Instance: id})
			d.Processes = append(d.Processes, gpu.Process{
				PID: 1<<22 - n, Name: strings.Repeat("\x01", 128), PodUID: long(36, n), ContainerID: long(64, n), Instance: id,
			})
		}
		devices = append(devices, d)
	}
	n := v1alpha1.GPUNode{Status: v1alpha1.GPUNodeStatus{Devices: plan.Reported(devices)}}
	for i := range devices {
		var counts []v1alpha1.InstanceCount
		for range instances {
			counts = append(counts, v1alpha1.InstanceCount{Profile: long(32, 0), Count: 1})
		}
		n.Spec.Devices = append(n.Spec.Devices, v1alpha1.DeviceSpec{UUID: devices[i].UUID, Sharing: v1alpha1.DeviceSharing{
			MIGMode: v1alpha1.MIGModeEnabled, Instances: counts,
		}})
	}
	n.Spec.Baseline, n.Status.Rollout.LastGood = &v1alpha1.Baseline{Devices: n.Spec.Devices}, &v1alpha1.NodeSharing{Devices: n.Spec.Devices}
	for i := range 32 {
		n.Status.Rollout.Steps = append(n.Status.Rollout.Steps, long(256, i), long(256, i))
		n.Status.Rollout.Blockers = append(n.Status.Rollout.Blockers, v1alpha1.BlockerStatus{
			Kind: v1alpha1.BlockerKindPod, Namespace: long(63, i), Name: long(253, i), ContainerName: long(63, i), DeviceUUID: devices[0].UUID, Handling: long(256, i),
		})
	}
	text, err := json.Marshal(&n)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(len(text)).To(BeNumerically("<", 256<<10))
	for _, d := range n.Status.Devices {
		g.Expect(d.Instances).To(HaveLen(instances))
		used := map[int32]bool{}
		for _, h := range d.Holders {
			used[*h.Instance] = true
		}
		g.Expect(used).To(HaveLen(instances))
	}
}

func TestReportedGPUsAreOrderedByIndex(t *testing.T) {
	devices := plan.Devices([]v1alpha1.DeviceStatus{{UUID: "b", Index: 1}, {UUID: "a"}})
	NewWithT(t).Expect(devices).To(HaveLen(2))
	NewWithT(t).Expect(devices[0].UUID).To(Equal("a"))
}
