// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The bounds of the API's lists and strings.
const (
	maxProcesses, maxHolders, maxProfiles, maxInstances, maxStarts = 32, 64, 32, 16, 32
	maxName, maxProduct                                            = 128, 96
)

// maxLists is how many bytes the lists of processes and holders of all GPUs of a node take at most. Nothing else in a GPUNode grows with its
// users, and the API server keeps no object of more than 1.5 MiB.
const maxLists = 128 << 10

// Reported is what the status of a GPUNode shows of observed GPUs: sorted, so that the same GPUs are the same status, and within the
// bounds of the API. Devices reads it.
func Reported(devices []gpu.Device) []v1alpha1.DeviceStatus {
	statuses := make([]v1alpha1.DeviceStatus, 0, len(devices))
	for _, d := range devices {
		statuses = append(statuses, deviceStatus(d))
	}
	slices.SortFunc(statuses, func(a, b v1alpha1.DeviceStatus) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	for i := len(statuses) - 1; i >= 0; i-- {
		if d := &statuses[i]; slices.EqualFunc(d.Profiles, knownProfiles(statuses[:i], d), sameProfile) {
			d.Profiles = nil
		}
	}
	for most := maxHolders; listsSize(statuses) > maxLists; most /= 2 {
		for i := range statuses {
			d := &statuses[i]
			holders := eachFirst(d.Holders, most, func(h v1alpha1.HolderStatus) int { return instanceID(h.Instance) })
			processes := eachFirst(d.Processes, most/2, func(p v1alpha1.ProcessStatus) int { return instanceID(p.Instance) })
			d.Holders, d.Processes = holders[:min(len(holders), most)], processes[:min(len(processes), most/2)]
		}
	}
	return statuses
}

// listsSize is how many bytes the lists of processes and holders take, or 0 where they are so few that it does not matter.
func listsSize(devices []v1alpha1.DeviceStatus) (bytes int) {
	const mostOfOne = 2 << 10
	users := 0
	for i := range devices {
		users += len(devices[i].Holders) + len(devices[i].Processes)
	}
	if users*mostOfOne <= maxLists {
		return 0
	}
	for i := range devices {
		for _, list := range []any{devices[i].Holders, devices[i].Processes} {
			text, err := json.Marshal(list)
			if err != nil {
				return 0 // cannot be: the lists hold strings and numbers only
			}
			bytes += len(text)
		}
	}
	return bytes
}

// WithProfiles returns the GPUs of a node as reported, each with its MIG profiles, which a report leaves out where they are known.
func WithProfiles(devices []v1alpha1.DeviceStatus) []v1alpha1.DeviceStatus {
	all := slices.Clone(devices)
	for i := range all {
		if d := &all[i]; len(d.Profiles) == 0 {
			d.Profiles = knownProfiles(all[:i], d)
		}
	}
	return all
}

// knownProfiles are the MIG profiles of a GPU that a report may leave out: those of the first GPU of its product that the report lists
// before it, else those of the catalogue.
func knownProfiles(before []v1alpha1.DeviceStatus, d *v1alpha1.DeviceStatus) []v1alpha1.ProfileStatus {
	if !d.MIGCapable || d.ProfilesUnknown {
		return nil
	}
	for i := range before {
		if before[i].Product == d.Product && len(before[i].Profiles) > 0 {
			return before[i].Profiles
		}
	}
	return catalogued()[d.Product].reported
}

// catalogued are the MIG profiles of the catalogue by product, as a report has them and as a plan takes them from one.
var catalogued = sync.OnceValue(func() map[string]profileLists {
	all := map[string]profileLists{}
	for _, product := range catalogue.Products() {
		d, _ := catalogue.Find(product)
		reported := profileStatuses(d.Profiles)
		all[product] = profileLists{reported, slices.Clip(profiles(reported))}
	}
	return all
})

type profileLists struct {
	reported []v1alpha1.ProfileStatus
	planned  []gpu.Profile
}

func deviceStatus(d gpu.Device) v1alpha1.DeviceStatus {
	s := v1alpha1.DeviceStatus{
		UUID: d.UUID, Index: number(d.Index), Product: format.First(gpu.ProductLabel(d.Product), maxProduct), MemoryMiB: d.MemoryMiB,
		ComputeCapability: d.ComputeCapability.String(), Virtual: d.Virtual, License: v1alpha1.LicenseState(d.License), MIGCapable: d.MIGCapable,
		ComputeMode: computeMode(d.State.ComputeMode), Sharing: Observed(d),
		Instances: instanceStatuses(d.State.Instances), ProfilesUnknown: d.MIGCapable && len(d.Profiles) == 0,
		Processes: processes(d.Processes), Holders: holders(d.Holders),
		ResetPeers: d.ResetPeers, ProcessesUnknown: d.ProcessesUnknown,
	}
	if d.PendingMIG != d.State.MIG {
		s.PendingMIGMode = migMode(d.PendingMIG)
	}
	if known := catalogued()[s.Product]; slices.EqualFunc(d.Profiles, known.planned, equalProfiles) {
		s.Profiles = known.reported
	} else {
		s.Profiles = profileStatuses(d.Profiles)
	}
	return s
}

func equalProfiles(a, b gpu.Profile) bool {
	return a.Name == b.Name && a.ID == b.ID && a.Slices == b.Slices && a.MemoryMiB == b.MemoryMiB && a.Max == b.Max && a.Size == b.Size &&
		slices.Equal(a.Starts, b.Starts)
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

func instanceStatuses(observed []gpu.Instance) []v1alpha1.InstanceStatus {
	return listed(observed, maxInstances, func(i gpu.Instance) v1alpha1.InstanceStatus {
		return v1alpha1.InstanceStatus{
			ID: number(i.ID), Profile: cmp.Or(i.Profile, "unknown"), UUID: i.UUID,
			Start: number(i.Placement.Start), Size: max(1, number(i.Placement.Size)),
		}
	}, func(s v1alpha1.InstanceStatus) int32 { return s.ID })
}

func profileStatuses(known []gpu.Profile) []v1alpha1.ProfileStatus {
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
	return listed(eachFirst(sorted, maxProcesses, func(p gpu.Process) int { return p.Instance }), maxProcesses, func(p gpu.Process) v1alpha1.ProcessStatus {
		return v1alpha1.ProcessStatus{
			PID: int64(p.PID), Name: format.First(p.Name, maxName), Instance: instance(p.Instance), PodUID: p.PodUID, ContainerID: p.ContainerID,
		}
	}, func(s v1alpha1.ProcessStatus) int64 { return s.PID })
}

func holders(holders []gpu.Holder) []v1alpha1.HolderStatus {
	return listed(eachFirst(holders, maxHolders, func(h gpu.Holder) int { return h.Instance }), maxHolders, func(h gpu.Holder) v1alpha1.HolderStatus {
		return v1alpha1.HolderStatus{Namespace: h.Namespace, PodName: h.Pod, ContainerName: h.Container, Instance: instance(h.Instance)}
	}, func(s v1alpha1.HolderStatus) gpu.Holder {
		return gpu.Holder{Namespace: s.Namespace, Pod: s.PodName, Container: s.ContainerName, Instance: instanceID(s.Instance)}
	})
}

// eachFirst puts one user of each instance before the others of a list that is cut: an instance in use never looks free.
func eachFirst[T any](users []T, most int, instance func(T) int) []T {
	if len(users) <= most {
		return users
	}
	var first, others []T
	seen := map[int]bool{}
	for _, u := range users {
		if seen[instance(u)] {
			others = append(others, u)
			continue
		}
		seen[instance(u)], first = true, append(first, u)
	}
	return append(first, others...)
}

// listed shows the first of a list, each key once.
func listed[T, S any, K comparable](all []T, most int, show func(T) S, key func(S) K) []S {
	var shown []S
	for _, one := range all {
		s := show(one)
		if slices.ContainsFunc(shown, func(o S) bool { return key(o) == key(s) }) {
			continue
		}
		if len(shown) == most {
			break
		}
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
