// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The bounds of the API's lists and strings.
const (
	maxProcesses, maxHolders, maxProfiles, maxInstances, maxStarts = 32, 64, 32, 16, 32
	maxName, maxProduct, maxSum                                    = 128, 96, 256
)

// statusOf is what the status shows of observed GPUs: sorted, so that the same GPUs are the same status.
func statusOf(devices []gpu.Device) []v1alpha1.DeviceStatus {
	statuses := make([]v1alpha1.DeviceStatus, 0, len(devices))
	for _, d := range devices {
		statuses = append(statuses, deviceStatus(d))
	}
	slices.SortFunc(statuses, func(a, b v1alpha1.DeviceStatus) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	return statuses
}

// sumOf sums up GPUs by product, in the order of their indexes.
func sumOf(devices []v1alpha1.DeviceStatus) string {
	var products []string
	counts := map[string]int{}
	for _, d := range devices {
		if counts[d.Product]++; counts[d.Product] == 1 {
			products = append(products, d.Product)
		}
	}
	for i, product := range products {
		products[i] = fmt.Sprintf("%d× %s", counts[product], cmp.Or(product, "unknown"))
	}
	return format.First(strings.Join(products, ", "), maxSum)
}

func deviceStatus(d gpu.Device) v1alpha1.DeviceStatus {
	s := v1alpha1.DeviceStatus{
		UUID: d.UUID, Index: number(d.Index), Product: format.First(gpu.ProductLabel(d.Product), maxProduct), MemoryMiB: d.MemoryMiB,
		ComputeCapability: d.ComputeCapability.String(), Virtual: d.Virtual, License: v1alpha1.LicenseState(d.License), MIGCapable: d.MIGCapable,
		ComputeMode: computeMode(d.State.ComputeMode), Sharing: plan.Observed(d),
		Instances: instances(d.State.Instances), Profiles: profiles(d.Profiles),
		Processes: processes(d.Processes), Holders: holders(d.Holders),
		ResetPeers: d.ResetPeers, ProcessesUnknown: d.ProcessesUnknown,
	}
	if d.PendingMIG != d.State.MIG {
		s.PendingMIGMode = migMode(d.PendingMIG)
	}
	return s
}

func migMode(enabled bool) v1alpha1.MIGMode {
	if enabled {
		return v1alpha1.MIGModeEnabled
	}
	return v1alpha1.MIGModeDisabled
}

func computeMode(m gpu.ComputeMode) v1alpha1.ComputeMode {
	switch m {
	case gpu.ComputeDefault:
		return v1alpha1.ComputeModeDefault
	case gpu.ComputeProhibited:
		return v1alpha1.ComputeModeProhibited
	case gpu.ComputeExclusiveProcess:
		return v1alpha1.ComputeModeExclusiveProcess
	}
	return "" // one that NVML has and the API does not know
}

func instances(observed []gpu.Instance) []v1alpha1.InstanceStatus {
	return listed(observed, maxInstances, func(i gpu.Instance) v1alpha1.InstanceStatus {
		return v1alpha1.InstanceStatus{
			ID: number(i.ID), Profile: cmp.Or(i.Profile, "unknown"), UUID: i.UUID,
			Start: number(i.Placement.Start), Size: max(1, number(i.Placement.Size)),
		}
	}, func(s v1alpha1.InstanceStatus) int32 { return s.ID })
}

func profiles(known []gpu.Profile) []v1alpha1.ProfileStatus {
	return listed(known, maxProfiles, func(p gpu.Profile) v1alpha1.ProfileStatus {
		s := v1alpha1.ProfileStatus{
			Name: p.Name, ID: number(p.ID), Slices: max(1, number(p.Slices)), MemoryMiB: p.MemoryMiB,
			Max: max(1, number(p.Max)), Size: max(1, number(p.Size)),
		}
		for _, start := range p.Starts[:min(len(p.Starts), maxStarts)] {
			s.Starts = append(s.Starts, number(start))
		}
		return s
	}, func(s v1alpha1.ProfileStatus) string { return s.Name })
}

// processes are the first by PID. One that uses several instances is shown with the first.
func processes(users []gpu.Process) []v1alpha1.ProcessStatus {
	sorted := slices.SortedStableFunc(slices.Values(users), func(a, b gpu.Process) int { return cmp.Compare(a.PID, b.PID) })
	return listed(sorted, maxProcesses, func(p gpu.Process) v1alpha1.ProcessStatus {
		return v1alpha1.ProcessStatus{
			PID: int64(p.PID), Name: format.First(p.Name, maxName), Instance: instance(p.Instance), PodUID: p.PodUID, ContainerID: p.ContainerID,
		}
	}, func(s v1alpha1.ProcessStatus) int64 { return s.PID })
}

func holders(holders []gpu.Holder) []v1alpha1.HolderStatus {
	return listed(holders, maxHolders, func(h gpu.Holder) v1alpha1.HolderStatus {
		return v1alpha1.HolderStatus{Namespace: h.Namespace, PodName: h.Pod, ContainerName: h.Container, Instance: instance(h.Instance)}
	}, func(s v1alpha1.HolderStatus) gpu.Holder {
		h := gpu.Holder{Namespace: s.Namespace, Pod: s.PodName, Container: s.ContainerName, Instance: gpu.WholeGPU}
		if s.Instance != nil {
			h.Instance = int(*s.Instance)
		}
		return h
	})
}

// listed shows the first of a list, each key once.
func listed[T, S any, K comparable](all []T, most int, show func(T) S, key func(S) K) []S {
	var shown []S
	seen := map[K]bool{}
	for _, one := range all {
		s := show(one)
		if seen[key(s)] {
			continue
		}
		if len(shown) == most {
			break
		}
		seen[key(s)] = true
		shown = append(shown, s)
	}
	return shown
}

func instance(id int) *int32 {
	if id == gpu.WholeGPU {
		return nil
	}
	n := number(id)
	return &n
}

// number is a count, an id or a position of the API, none of which is negative.
func number(n int) int32 {
	return int32(min(max(n, 0), math.MaxInt32))
}
