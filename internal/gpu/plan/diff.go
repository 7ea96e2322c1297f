// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Diff lists the steps that bring one GPU from what it is to what is wanted, MPS aside, which concerns several GPUs. It
// knows no strategy. Instances that are as wanted are left alone.
func Diff(d gpu.Device, want gpu.State) []Step {
	var steps []Step
	for _, i := range surplus(d, want) {
		steps = append(steps, destroyInstance{device: d, instance: i})
	}
	switch {
	case d.State.MIG != want.MIG:
		steps = append(steps, setMIG{device: d, enabled: want.MIG})
	case d.PendingMIG != want.MIG:
		steps = append(steps, keepMIG{device: d})
	}
	if !want.MIG && d.State.ComputeMode != want.ComputeMode && (want.MPS == nil || !fleeting(d)) {
		steps = append(steps, setComputeMode{device: d, mode: want.ComputeMode})
	}
	if !want.MIG && want.TimeSlice != gpu.TimeSliceUnread && d.State.TimeSlice != want.TimeSlice {
		steps = append(steps, setTimeSlice{device: d, slice: want.TimeSlice})
	}
	for _, i := range missing(d, want) {
		steps = append(steps, createInstance{device: d, instance: i})
	}
	return steps
}

// fleeting reports whether an MPS daemon serves a GPU whose compute mode cannot be kept: it is lost whenever no program
// has the GPU open, and to set it again is in vain.
func fleeting(d gpu.Device) bool {
	return d.State.MPS != nil && d.Persistence == gpu.PersistenceUnsupported
}

// surplus are the instances that have to go. Used ones come first, so that a plan that has to wait for them waits
// before it has destroyed anything; then by placement.
func surplus(d gpu.Device, want gpu.State) []gpu.Instance {
	var free, used []gpu.Instance
	for _, i := range d.State.Instances {
		switch {
		case !i.Partial && slices.ContainsFunc(want.Instances, alike(i)):
		case d.InUse(i.ID):
			used = append(used, i)
		default:
			free = append(free, i)
		}
	}
	slices.SortFunc(free, byPlacement)
	slices.SortFunc(used, byPlacement)
	return append(used, free...)
}

// missing are the instances to create: large ones first, as an operator would by hand, then by placement.
func missing(d gpu.Device, want gpu.State) []gpu.Instance {
	var create []gpu.Instance
	for _, i := range want.Instances {
		there := slices.ContainsFunc(d.State.Instances, func(o gpu.Instance) bool { return !o.Partial && alike(i)(o) })
		if !there {
			create = append(create, i)
		}
	}
	slices.SortStableFunc(create, func(a, b gpu.Instance) int {
		if a.Placement.Size != b.Placement.Size {
			return b.Placement.Size - a.Placement.Size
		}
		return byPlacement(a, b)
	})
	return create
}

func alike(i gpu.Instance) func(gpu.Instance) bool {
	return func(o gpu.Instance) bool { return o.Profile == i.Profile && o.Placement == i.Placement }
}
