// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mig knows the names of MIG profiles and packs instances onto a GPU. It is pure.
package mig

import "github.com/gpusharing/gpu-sharing-operator/internal/gpu"

// Packing is how a GPU gets from the instances that it has to those that are wanted. Keep and Create together are the
// wanted instances, with a placement each.
type Packing struct {
	Keep    []gpu.Instance
	Destroy []gpu.Instance // free ones first
	Create  []gpu.Instance
	// InUse is the part of Destroy that somebody uses: the wish cannot be met before they are freed.
	InUse []gpu.Instance
}

// Pack finds the packing that frees the fewest used instances, among those the one that destroys the fewest instances,
// among those the one that leaves the most room for larger profiles. want counts instances by exact profile name.
// Errors: *ProfileError for a profile that the GPU does not have, *FitError for instances that do not fit together even
// on the empty GPU.
func Pack(d gpu.Device, want map[string]int) (Packing, error) { panic("not written yet") }

// Resolve finds the profile of a GPU that a name means: the exact one, or for a number of slices (3g, 1g+me) the
// smallest of that many slices with those attributes. Errors: *ProfileError.
func Resolve(d gpu.Device, name string) (gpu.Profile, error) { panic("not written yet") }

// Fill is how many instances of a profile fit on the empty GPU.
func Fill(d gpu.Device, profile gpu.Profile) int { panic("not written yet") }
