// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import "github.com/gpusharing/gpu-sharing-operator/internal/gpu"

// Slices is a number of compute slices and of memory slices of a GPU.
type Slices struct{ Compute, Memory int }

// Unused returns the slices of a GPU that none of the instances has. They stay unused until the layout changes: of 7 ×
// 1g the eighth memory slice, of 2 × 3g the seventh compute slice. Zero if the driver does not report the GPU's
// profiles.
func Unused(d gpu.Device, instances []gpu.Instance) Slices {
	unused := Slices{Compute: d.ComputeSlices(), Memory: d.MemorySlices()}
	for _, i := range instances {
		p, _ := d.Profile(i.Profile)
		unused.Compute -= p.Slices
		unused.Memory -= i.Placement.Size
	}
	return Slices{Compute: max(unused.Compute, 0), Memory: max(unused.Memory, 0)}
}
