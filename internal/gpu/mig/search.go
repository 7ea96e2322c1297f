// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Keeping an instance in use outweighs keeping any number of others.
const (
	keepsFree = 1
	keepsUsed = 1 << 16
)

// maxVisits bounds the search for a better arrangement once one is found. It is far beyond what GPUs of 16 memory
// slices need; a driver that describes a GPU with many more gets an arrangement that fits and may not be the best.
const maxVisits = 1 << 20

// place is where an instance of a wanted profile can lie, or does.
type place struct {
	placement gpu.Placement
	slots     slots
	value     int // of choosing it
	instance  int // index of the instance that lies there and can be kept; -1 if there is none
}

// pick is a place chosen for one instance of a request.
type pick struct{ request, place int }

// search finds the best arrangement of the requests by trying all: for each request, largest first, every choice of its
// places that are still free. Destroying the fewest is keeping the most, so a place is worth what is kept by choosing
// it.
type search struct {
	requests []request
	places   [][]place // of each request, by start
	gain     []int     // the most that requests from here on can still be worth
	shapes   []shape
	compute  int // compute slices that all requests leave

	visits    int
	picked    []pick
	best      []pick
	bestSlots slots
	bestValue int
	found     bool
}

func newSearch(d gpu.Device, requests []request) *search {
	s := &search{requests: requests, shapes: shapesOf(d.Profiles), compute: d.ComputeSlices(), gain: make([]int, len(requests)+1)}
	for _, w := range requests {
		s.places = append(s.places, placesOf(d, w.profile))
		s.compute -= w.count * w.profile.Slices
	}
	for i := len(requests) - 1; i >= 0; i-- {
		s.gain[i] = s.gain[i+1] + gainOf(s.places[i], requests[i].count)
	}
	return s
}

// placesOf are the places of a profile: where the driver allows one, and where one lies already.
func placesOf(d gpu.Device, p gpu.Profile) []place {
	places := make([]place, 0, len(p.Starts)+1)
	for _, start := range p.Starts {
		at := gpu.Placement{Start: start, Size: p.Size}
		if m := slotsOf(at); m != 0 {
			places = append(places, place{placement: at, slots: m, instance: -1})
		}
	}
	for i, instance := range d.State.Instances {
		m := slotsOf(instance.Placement)
		if instance.Profile != p.Name || instance.Partial || m == 0 {
			continue
		}
		there := place{placement: instance.Placement, slots: m, value: keepsFree, instance: i}
		if d.InUse(instance.ID) {
			there.value += keepsUsed
		}
		places = slices.DeleteFunc(places, func(o place) bool { return o.placement == there.placement })
		places = append(places, there)
	}
	slices.SortFunc(places, func(a, b place) int { return cmp.Compare(a.placement.Start, b.placement.Start) })
	return places
}

// gainOf is what the best places are worth together.
func gainOf(places []place, count int) int {
	values := make([]int, 0, len(places))
	for _, p := range places {
		values = append(values, p.value)
	}
	slices.SortFunc(values, func(a, b int) int { return b - a })
	sum := 0
	for _, v := range values[:min(count, len(values))] {
		sum += v
	}
	return sum
}

// run searches and reports whether the requests fit at all.
func (s *search) run() bool {
	s.next(0, 0, 0)
	return s.found
}

// next goes on with the request i.
func (s *search) next(i int, taken slots, value int) {
	switch {
	case s.found && value+s.gain[i] < s.bestValue:
	case i == len(s.requests):
		s.offer(taken, value)
	default:
		s.choose(i, 0, s.requests[i].count, taken, value)
	}
}

// choose tries the places of request i from the given one on for the instances that are left.
func (s *search) choose(i, from, left int, taken slots, value int) {
	if left == 0 {
		s.next(i+1, taken, value)
		return
	}
	for n := from; n <= len(s.places[i])-left; n++ {
		p := s.places[i][n]
		if taken&p.slots != 0 {
			continue
		}
		if s.visits++; s.found && s.visits > maxVisits {
			return
		}
		s.picked = append(s.picked, pick{request: i, place: n})
		s.choose(i, n+1, left-1, taken|p.slots, value+p.value)
		s.picked = s.picked[:len(s.picked)-1]
	}
}

// offer takes the arrangement that is picked if it is better than the best so far.
func (s *search) offer(taken slots, value int) {
	better := !s.found || value > s.bestValue ||
		value == s.bestValue && taken != s.bestSlots && moreRoom(s.shapes, s.compute, taken, s.bestSlots)
	if better {
		s.found, s.bestSlots, s.bestValue = true, taken, value
		s.best = append(s.best[:0], s.picked...)
	}
}
