// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// slots is a set of memory slices; no GPU has more than 64.
type slots uint64

const maxSlots = 64

func slotsOf(p gpu.Placement) slots {
	if p.Start < 0 || p.Size < 1 || p.Start+p.Size > maxSlots {
		return 0
	}
	return slots(1<<p.Size-1) << p.Start
}

// shape is what matters of a profile to the room that it needs. Profiles that differ in their engines share one.
type shape struct {
	compute int
	places  []slots // ascending by start
}

func shapeOf(p gpu.Profile) shape {
	s := shape{compute: p.Slices}
	for _, start := range p.Starts {
		if m := slotsOf(gpu.Placement{Start: start, Size: p.Size}); m != 0 {
			s.places = append(s.places, m)
		}
	}
	slices.Sort(s.places)
	return s
}

// count is how many instances of the shape find room beside what is taken, with that many compute slices left. Places
// are of one size, so taking the first that is free each time is best.
func (s shape) count(taken slots, compute int) int {
	n := 0
	for _, m := range s.places {
		if taken&m != 0 || compute < s.compute {
			continue
		}
		taken |= m
		compute -= s.compute
		n++
	}
	return n
}

// shapesOf are the distinct shapes of a GPU's profiles, largest first.
func shapesOf(profiles []gpu.Profile) []shape {
	var shapes []shape
	for _, p := range slices.SortedStableFunc(slices.Values(profiles), largestFirst) {
		s := shapeOf(p)
		known := slices.ContainsFunc(shapes, func(o shape) bool {
			return o.compute == s.compute && slices.Equal(o.places, s.places)
		})
		if !known {
			shapes = append(shapes, s)
		}
	}
	return shapes
}

// moreRoom reports whether a leaves more room than b: room for more instances of the largest shape, if equal of the
// next one, and so on. Each shape is counted by itself, as if only instances of it were added.
func moreRoom(shapes []shape, compute int, a, b slots) bool {
	for _, s := range shapes {
		if m, n := s.count(a, compute), s.count(b, compute); m != n {
			return m > n
		}
	}
	return false
}
