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
	"fmt"
	"slices"
	"strings"

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
	var least *gpu.Profile
	for i := range d.Profiles {
		p := &d.Profiles[i]
		if p.Slices != wanted.Slices || least != nil &&
			cmp.Or(cmp.Compare(p.Size, least.Size), cmp.Compare(p.MemoryMiB, least.MemoryMiB), cmp.Compare(p.Name, least.Name)) >= 0 {
			continue
		}
		if n, err := ParseName(p.Name); err == nil && n.Compute == 0 && n.SameAttributes(wanted) {
			least = p
		}
	}
	if least == nil {
		return gpu.Profile{}, &ProfileError{Device: d, Name: name}
	}
	return *least, nil
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

// The attributes that a profile name can carry.
const (
	// MediaExtension is the attribute, after a plus, of the profile that has the media engines of a small instance;
	// after a minus, of one that has none.
	MediaExtension = "me"
	// AllMedia is the attribute of a profile that has every media engine of the GPU.
	AllMedia = "me.all"
	// Graphics is the attribute of a profile that can render.
	Graphics = "gfx"
)

// Name is the name of a MIG profile, taken apart:
//
//	[<compute>c.]<slices>g[.<memory>gb][+<attribute>[,<attribute>]][-<attribute>]
//
// The grammar is that of NVIDIA's tools (NVIDIA/go-nvlib, pkg/nvlib/device/mig_profile.go), and a name without its
// memory, which stands for the smallest profile of that many slices.
type Name struct {
	Compute  int      // compute slices of a compute instance smaller than its GPU instance; 0 if it spans it
	Slices   int      // compute slices of the GPU instance
	MemoryGB int      // 0 in a name by slices
	With     []string // attributes after the plus
	Without  []string // attributes after the minus
}

// ParseName takes the name of a MIG profile apart. Errors: a text that is not such a name.
func ParseName(s string) (Name, error) {
	n, is := parse(s)
	if !is {
		return Name{}, fmt.Errorf("%q is not the name of a MIG profile, such as 1g.10gb, 1g.10gb+me or 3g", s)
	}
	if n.Compute > n.Slices {
		return Name{}, fmt.Errorf("%q names a compute instance larger than its GPU instance", s)
	}
	if n.Compute == n.Slices {
		n.Compute = 0
	}
	return n, nil
}

// parse reads the grammar. Each plan parses names, and a regular expression takes many times as long.
func parse(s string) (n Name, is bool) {
	s, without, less := strings.Cut(s, "-")
	s, with, more := strings.Cut(s, "+")
	compute, whole, part := strings.Cut(s, "c.")
	if !part {
		compute, whole = "", s
	}
	count, memory, ends := strings.Cut(whole, "g")
	memory, sized := strings.CutPrefix(memory, ".")
	memory, unit := strings.CutSuffix(memory, "gb")
	n = Name{Compute: number(compute, 2), Slices: number(count, 2), MemoryGB: number(memory, 4), With: list(with), Without: list(without)}
	return n, ends && n.Slices > 0 && part == (n.Compute > 0) && sized == unit && sized == (n.MemoryGB > 0) && sized == (memory != "") &&
		more == (n.With != nil) && less == (n.Without != nil)
}

// SameAttributes reports whether two names ask for the same engines.
func (n Name) SameAttributes(o Name) bool {
	return slices.Equal(n.With, o.With) && slices.Equal(n.Without, o.Without)
}

// number reads so many digits at most; 0: it is no number from 1 up.
func number(digits string, most int) (n int) {
	for i, d := range []byte(digits) {
		if d < '0' || d > '9' || i == most || n == 0 && d == '0' {
			return 0
		}
		n = 10*n + int(d-'0')
	}
	return n
}

// list reads attributes; nil: there is none, or one is not of letters and dots.
func list(attributes string) []string {
	if attributes == "" {
		return nil
	}
	l := strings.Split(attributes, ",")
	for _, a := range l {
		if a == "" || strings.Trim(a, "abcdefghijklmnopqrstuvwxyz.") != "" {
			return nil
		}
	}
	slices.Sort(l)
	return l
}
