// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mig knows the names of MIG profiles and packs instances onto a GPU. It is pure. All that it knows of a GPU is
// what the driver says: the profiles, and where an instance of each may lie. So it works for GPUs that it has never
// heard of. What the driver does not say, it takes from the MIG User Guide:
//
//   - instances do not overlap, and there are at most as many of a profile as the driver says;
//   - together they have at most the compute slices of the largest profile;
//   - one instance at most has media extensions (+me, +me.all), and beside +me.all every other is without media (-me).
package mig

import (
	"cmp"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Resolve finds the profile of a GPU that a name means: the exact one, or for a number of slices (3g, 1g+me) the
// one with the least memory of those with that many slices and exactly those attributes. Errors: *ProfileError.
func Resolve(d gpu.Device, name string) (gpu.Profile, error) {
	if p, ok := d.Profile(name); ok {
		return p, nil
	}
	wanted, err := ParseName(name)
	if err != nil {
		return gpu.Profile{}, &ProfileError{Device: d, Name: name, Why: err.Error()}
	}
	if wanted.Compute != 0 {
		return gpu.Profile{}, &ProfileError{
			Device: d, Name: name,
			Why: "a compute instance smaller than its GPU instance cannot be advertised by NVIDIA's device plugin",
		}
	}
	if wanted.MemoryGB != 0 {
		return gpu.Profile{}, &ProfileError{Device: d, Name: name}
	}
	return bySlices(d, name, wanted)
}

func bySlices(d gpu.Device, name string, wanted Name) (gpu.Profile, error) {
	var candidates []gpu.Profile
	for _, p := range d.Profiles {
		if p.Slices != wanted.Slices {
			continue
		}
		if n, err := ParseName(p.Name); err == nil && n.Compute == 0 && n.SameAttributes(wanted) {
			candidates = append(candidates, p)
		}
	}
	if len(candidates) == 0 {
		return gpu.Profile{}, &ProfileError{Device: d, Name: name}
	}
	return slices.MinFunc(candidates, func(a, b gpu.Profile) int {
		return cmp.Or(cmp.Compare(a.Size, b.Size), cmp.Compare(a.MemoryMiB, b.MemoryMiB), cmp.Compare(a.Name, b.Name))
	}), nil
}

// Fill is how many instances of a profile fit on the empty GPU.
func Fill(d gpu.Device, profile gpu.Profile) int {
	free := shapeOf(profile).count(0, d.ComputeSlices())
	return min(free, profile.Max)
}

// largestFirst orders profiles by what an instance takes; equal ones by name, the plain one first.
func largestFirst(a, b gpu.Profile) int {
	return cmp.Or(
		cmp.Compare(b.Size, a.Size),
		cmp.Compare(b.Slices, a.Slices),
		cmp.Compare(b.MemoryMiB, a.MemoryMiB),
		cmp.Compare(a.Name, b.Name),
	)
}

// media is what a profile's name says of the media engines.
type media int

const (
	plainMedia media = iota
	noMedia          // -me
	someMedia        // +me
	allMedia         // +me.all
)

func mediaOf(profile string) media {
	n, err := ParseName(profile)
	switch {
	case err != nil:
		return plainMedia
	case slices.Contains(n.With, AllMedia):
		return allMedia
	case slices.Contains(n.With, MediaExtension):
		return someMedia
	case slices.Contains(n.Without, MediaExtension):
		return noMedia
	}
	return plainMedia
}
