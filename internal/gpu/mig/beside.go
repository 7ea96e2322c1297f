// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Beside calls yield with every set of further instances that fit on a GPU beside those that stay, the empty set first.
// An instance of the set is one of those that may go, or a new one of the profiles named. Each set comes once, by
// placement, and is valid during the call. There are a few hundred at most on the GPUs that are known. Errors:
// *ProfileError for a profile that the GPU does not have.
func Beside(d gpu.Device, stay, mayGo []gpu.Instance, profiles []string, yield func(further []gpu.Instance)) error {
	b := beside{device: d, yield: yield, compute: d.ComputeSlices()}
	for _, i := range stay {
		k, err := b.kind(i.Profile)
		if err != nil {
			return err
		}
		b.taken |= slotsOf(i.Placement)
		b.compute -= b.kinds[k].profile.Slices
		b.count(k, 1)
	}
	for _, i := range mayGo {
		k, err := b.kind(i.Profile)
		if err != nil {
			return err
		}
		b.places = append(b.places, further{i, k, slotsOf(i.Placement)})
	}
	for _, name := range profiles {
		k, err := b.kind(name)
		if err != nil {
			return err
		}
		b.add(k, mayGo)
	}
	slices.SortStableFunc(b.places, func(x, y further) int { return byPlacement(x.Instance, y.Instance) })
	b.next(0)
	return nil
}

// further is an instance that may be added.
type further struct {
	gpu.Instance

	kind  int
	slots slots
}

// kind is a profile, and how many instances of it there are.
type kind struct {
	profile gpu.Profile
	media   media
	number  int
}

type beside struct {
	device  gpu.Device
	yield   func([]gpu.Instance)
	places  []further // by start
	kinds   []kind
	media   [allMedia + 1]int // instances
	total   int
	taken   slots
	compute int // slices that remain
	set     []gpu.Instance
}

func (b *beside) kind(name string) (int, error) {
	if at := slices.IndexFunc(b.kinds, func(k kind) bool { return k.profile.Name == name }); at >= 0 {
		return at, nil
	}
	p, ok := b.device.Profile(name)
	if !ok {
		return 0, &ProfileError{Device: b.device, Name: name}
	}
	b.kinds = append(b.kinds, kind{profile: p, media: mediaOf(name)})
	return len(b.kinds) - 1, nil
}

// add adds the places of a profile but those where one of its instances lies already.
func (b *beside) add(k int, there []gpu.Instance) {
	p := b.kinds[k].profile
	for _, start := range p.Starts {
		i := gpu.Instance{Profile: p.Name, Placement: gpu.Placement{Start: start, Size: p.Size}}
		lies := slices.ContainsFunc(there, func(o gpu.Instance) bool { return o.Profile == i.Profile && o.Placement == i.Placement })
		if m := slotsOf(i.Placement); !lies && m&b.taken == 0 {
			b.places = append(b.places, further{i, k, m})
		}
	}
}

// count adds to the number of instances of a profile and reports whether the GPU may have as many.
func (b *beside) count(k, n int) bool {
	of := &b.kinds[k]
	of.number += n
	b.media[of.media] += n
	b.total += n
	return of.number <= of.profile.Max && exceedsMedia(b.media, b.total) == ""
}

// next adds each of the places from one on in turn.
func (b *beside) next(from int) {
	b.yield(b.set)
	for n := from; n < len(b.places); n++ {
		p := &b.places[n]
		slices := b.kinds[p.kind].profile.Slices
		if p.slots == 0 || p.slots&b.taken != 0 || slices > b.compute {
			continue
		}
		if b.count(p.kind, 1) {
			b.taken, b.compute, b.set = b.taken|p.slots, b.compute-slices, append(b.set, p.Instance)
			b.next(n + 1)
			b.taken, b.compute, b.set = b.taken&^p.slots, b.compute+slices, b.set[:len(b.set)-1]
		}
		b.count(p.kind, -1)
	}
}

// Fragmentation is how many memory slices instances leave of which profiles cannot make use, summed over the profiles:
// those that are free, less those of as many further instances of one profile as find room. 0: each profile can use
// all that is free. After FGD (Weng et al., USENIX ATC 2023), with equal weights.
func Fragmentation(d gpu.Device, instances []gpu.Instance, profiles []string) int {
	taken, compute, free := slots(0), d.ComputeSlices(), d.MemorySlices()
	for _, i := range instances {
		taken |= slotsOf(i.Placement)
		free -= i.Placement.Size
		if p, ok := d.Profile(i.Profile); ok {
			compute -= p.Slices
		}
	}
	sum := 0
	for _, name := range profiles {
		if p, ok := d.Profile(name); ok {
			sum += free - p.Size*shapeOf(p).count(taken, compute)
		}
	}
	return sum
}
