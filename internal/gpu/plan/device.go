// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// deviceOf is a GPU without its profiles.
func deviceOf(s *v1alpha1.DeviceStatus) gpu.Device {
	d := gpu.Device{
		UUID:              s.UUID,
		Index:             int(s.Index),
		Product:           s.Product,
		MemoryMiB:         s.MemoryMiB,
		ComputeCapability: computeCapability(s.ComputeCapability),
		Virtual:           s.Virtual,
		License:           gpu.License(s.License),
		MIGCapable:        s.MIGCapable,
		ResetPeers:        s.ResetPeers,
		ProcessesUnknown:  s.ProcessesUnknown,
		State:             state(s),
	}
	d.PendingMIG = d.State.MIG
	if s.PendingMIGMode != "" {
		d.PendingMIG = s.PendingMIGMode == v1alpha1.MIGModeEnabled
	}
	for _, p := range s.Processes {
		d.Processes = append(d.Processes, gpu.Process{
			PID: int(p.PID), Name: p.Name, Instance: instanceID(p.Instance),
			PodUID: p.PodUID, ContainerID: p.ContainerID, MPSServer: p.Name == gpu.MPSServer,
		})
	}
	for _, h := range s.Holders {
		d.Holders = append(d.Holders, gpu.Holder{
			Namespace: h.Namespace, Pod: h.PodName, Container: h.ContainerName, Instance: instanceID(h.Instance),
		})
	}
	return d
}

// Devices are the GPUs of a node as its agent reported them, by index, so that the controller plans from a report exactly as the agent
// plans from the hardware. What a report does not tell (the PCI address) stays empty. The agent reports the name of NVIDIA's MPS server of
// no other process. Neighbours with equal profiles, which most are, share them, and all whose profiles are the catalogue's.
func Devices(status []v1alpha1.DeviceStatus) []gpu.Device {
	known := catalogued()
	status = WithProfiles(status)
	devices := make([]gpu.Device, 0, len(status))
	for i := range status {
		d, of := deviceOf(&status[i]), status[i].Profiles
		switch listed := known[status[i].Product]; {
		case len(of) > 0 && len(listed.reported) > 0 && &of[0] == &listed.reported[0]:
			d.Profiles = listed.planned
		case i > 0 && slices.EqualFunc(of, status[i-1].Profiles, sameProfile):
			d.Profiles = devices[i-1].Profiles
		default:
			d.Profiles = profiles(of)
		}
		devices = append(devices, d)
	}
	slices.SortFunc(devices, func(a, b gpu.Device) int { return cmp.Compare(a.Index, b.Index) })
	return devices
}

func sameProfile(a, b v1alpha1.ProfileStatus) bool {
	return a.Name == b.Name && a.ID == b.ID && a.Slices == b.Slices && a.MemoryMiB == b.MemoryMiB && a.Max == b.Max &&
		a.Size == b.Size && slices.Equal(a.Starts, b.Starts)
}

func state(s *v1alpha1.DeviceStatus) gpu.State {
	have := gpu.State{MIG: s.Sharing.MIGMode == v1alpha1.MIGModeEnabled, TimeSlice: gpu.TimeSlice(s.Sharing.TimeSliceInterval)}
	switch s.ComputeMode {
	case v1alpha1.ComputeModeExclusiveProcess:
		have.ComputeMode = gpu.ComputeExclusiveProcess
	case v1alpha1.ComputeModeProhibited:
		have.ComputeMode = gpu.ComputeProhibited
	case v1alpha1.ComputeModeDefault:
	}
	for _, i := range s.Instances {
		have.Instances = append(have.Instances, gpu.Instance{
			Profile: i.Profile, ID: int(i.ID), UUID: i.UUID, Partial: i.UUID == "",
			Placement: gpu.Placement{Start: int(i.Start), Size: int(i.Size)},
		})
	}
	slices.SortFunc(have.Instances, func(a, b gpu.Instance) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	if m := s.Sharing.MPS; m != nil {
		have.MPS = &gpu.MPSDaemon{
			Resource: m.ResourceName, External: m.Owner == v1alpha1.MPSDaemonOwnerNVIDIA, MultiUser: m.MultiUser,
			ActiveThreadPercentage: int(m.ActiveThreadPercentage), PinnedMemoryLimitMiB: MiB(m.PinnedMemoryLimit),
		}
	}
	return have
}

func profiles(all []v1alpha1.ProfileStatus) []gpu.Profile {
	var profiles []gpu.Profile
	for _, p := range all {
		profiles = append(profiles, profile(p))
	}
	return profiles
}

func profile(p v1alpha1.ProfileStatus) gpu.Profile {
	starts := make([]int, 0, len(p.Starts))
	for _, start := range p.Starts {
		starts = append(starts, int(start))
	}
	slices.Sort(starts)
	return gpu.Profile{
		Name: p.Name, ID: int(p.ID), Slices: int(p.Slices), MemoryMiB: p.MemoryMiB,
		Max: int(p.Max), Size: int(p.Size), Starts: starts,
	}
}

// computeCapability reads a version such as 8.0; what cannot be read is 0.0, which is older than any.
func computeCapability(version string) gpu.ComputeCapability {
	before, after, _ := strings.Cut(version, ".")
	major, errMajor := strconv.Atoi(before)
	minor, errMinor := strconv.Atoi(after)
	if errMajor != nil || errMinor != nil {
		return gpu.ComputeCapability{}
	}
	return gpu.ComputeCapability{Major: major, Minor: minor}
}

func instanceID(id *int32) int {
	if id == nil {
		return gpu.WholeGPU
	}
	return int(*id)
}
