// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Packing is how a GPU gets from the instances that it has to those that are wanted. Keep and Create together are the
// wanted instances, with a placement each.
type Packing struct {
	Keep    []gpu.Instance // by placement
	Destroy []gpu.Instance // by placement
	Create  []gpu.Instance // largest first, then by placement
	// InUse is the part of Destroy that is in use: the request cannot be met before they are freed.
	InUse []gpu.Instance
}

// Pack finds the packing that frees the fewest used instances, among those one that destroys the fewest instances,
// among those one that leaves the most room for larger profiles: room for more instances of the GPU's largest profile
// beside the wanted ones, if equal of the next largest, and so on. Among equals the one whose larger instances lie
// lowest, so that the same input has the same packing.
//
// want counts instances by exact profile name; whatever else the GPU has is destroyed, and a partial instance always.
// Errors: *ProfileError for a profile that the GPU does not have, *FitError for instances that do not fit together even
// on the empty GPU.
func Pack(d gpu.Device, want map[string]int) (Packing, error) {
	requests, err := requestsOf(d, want)
	if err != nil {
		return Packing{}, err
	}
	if why := exceeds(d, requests); why != "" {
		return Packing{}, unfit(d, want, requests, why)
	}
	s := newSearch(d, requests)
	if !s.run() {
		return Packing{}, unfit(d, want, requests, "the places where they may lie overlap")
	}
	return s.packing(d), nil
}

// request is a number of instances of one profile.
type request struct {
	profile gpu.Profile
	count   int
}

// requestsOf looks up the wanted profiles, largest first.
func requestsOf(d gpu.Device, want map[string]int) ([]request, error) {
	requests := make([]request, 0, len(want))
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if want[name] <= 0 {
			continue
		}
		p, ok := d.Profile(name)
		if !ok {
			return nil, &ProfileError{Device: d, Name: name}
		}
		requests = append(requests, request{profile: p, count: want[name]})
	}
	slices.SortFunc(requests, func(a, b request) int { return largestFirst(a.profile, b.profile) })
	return requests, nil
}

// exceeds says which limit of the GPU the requests exceed wherever they lie; empty if none.
func exceeds(d gpu.Device, requests []request) string {
	compute, memory := 0, 0
	for _, w := range requests {
		if w.count > w.profile.Max {
			return fmt.Sprintf("the GPU can have %d × %s at most", w.profile.Max, w.profile.Name)
		}
		compute += w.count * w.profile.Slices
		memory += w.count * w.profile.Size
	}
	if has := d.ComputeSlices(); compute > has {
		return fmt.Sprintf("they need %d compute slices and the GPU has %d", compute, has)
	}
	if has := d.MemorySlices(); memory > has {
		return fmt.Sprintf("they need %d memory slices and the GPU has %d", memory, has)
	}
	return exceedsMedia(requests)
}

// exceedsMedia applies the rules of the media engines, which the driver does not describe (MIG User Guide, "Device
// Profiles").
func exceedsMedia(requests []request) string {
	var number [allMedia + 1]int
	total := 0
	for _, w := range requests {
		number[mediaOf(w.profile.Name)] += w.count
		total += w.count
	}
	switch {
	case number[someMedia]+number[allMedia] > 1:
		return "one instance of a GPU at most can have media extensions (+me, +me.all)"
	case number[allMedia] == 1 && number[noMedia] != total-1:
		return "an instance with +me.all has all media engines, so every other one must be without (-me)"
	}
	return ""
}

// unfit explains why the requests do not fit and how many of them would.
func unfit(d gpu.Device, want map[string]int, requests []request, why string) *FitError {
	fits := map[string]int{}
	var part []request
	for _, w := range requests {
		for n := w.count; n > 0; n-- {
			more := append(slices.Clone(part), request{profile: w.profile, count: n})
			if exceeds(d, more) == "" && newSearch(d, more).run() {
				part, fits[w.profile.Name] = more, n
				break
			}
		}
	}
	return &FitError{Device: d, Want: maps.Clone(want), Why: why, Fits: fits}
}

// packing tells apart what the best arrangement keeps, creates and gives up.
func (s *search) packing(d gpu.Device) Packing {
	var p Packing
	kept := make(map[int]bool, len(d.State.Instances))
	for _, pick := range s.best {
		if c := s.places[pick.request][pick.place]; c.instance >= 0 {
			kept[c.instance] = true
			p.Keep = append(p.Keep, d.State.Instances[c.instance])
		} else {
			p.Create = append(p.Create, gpu.Instance{Profile: s.requests[pick.request].profile.Name, Placement: c.placement})
		}
	}
	for i, instance := range d.State.Instances {
		if kept[i] {
			continue
		}
		p.Destroy = append(p.Destroy, instance)
		if d.InUse(instance.ID) {
			p.InUse = append(p.InUse, instance)
		}
	}
	slices.SortFunc(p.Keep, byPlacement)
	slices.SortFunc(p.InUse, byPlacement)
	slices.SortFunc(p.Destroy, byPlacement)
	return p
}

func byPlacement(a, b gpu.Instance) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) }
