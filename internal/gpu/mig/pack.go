// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

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
	if isPacked(d, requests) {
		return Packing{Keep: slices.SortedFunc(slices.Values(d.State.Instances), byPlacement)}, nil
	}
	s := newSearch(d, requests)
	if !s.run() {
		return Packing{}, unfit(d, want, requests, "the places where they may lie overlap")
	}
	return s.packing(d), nil
}

// isPacked reports whether the GPU has just what is requested, which most GPUs do: to keep all of it destroys nothing, and
// nothing else does.
func isPacked(d gpu.Device, requests []request) bool {
	total, taken := 0, slots(0)
	for _, w := range requests {
		for _, i := range d.State.Instances {
			if i.Profile == w.profile.Name && !i.Partial {
				at := slotsOf(i.Placement)
				if w.count--; at == 0 || taken&at != 0 {
					return false
				}
				total, taken = total+1, taken|at
			}
		}
		if w.count != 0 {
			return false
		}
	}
	return total == len(d.State.Instances)
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
	compute, memory, total := 0, 0, 0
	var number [allMedia + 1]int
	for _, w := range requests {
		if w.count > w.profile.Max {
			return fmt.Sprintf("the GPU can have %d × %s at most", w.profile.Max, w.profile.Name)
		}
		compute += w.count * w.profile.Slices
		memory += w.count * w.profile.Size
		number[mediaOf(w.profile.Name)] += w.count
		total += w.count
	}
	if has := d.ComputeSlices(); compute > has {
		return fmt.Sprintf("they need %d compute slices and the GPU has %d", compute, has)
	}
	if has := d.MemorySlices(); memory > has {
		return fmt.Sprintf("they need %d memory slices and the GPU has %d", memory, has)
	}
	return exceedsMedia(number, total)
}

// exceedsMedia applies the rules of the media engines, which the driver does not describe (MIG User Guide, "Device
// Profiles"), to the number of instances by their media engines and in total.
func exceedsMedia(number [allMedia + 1]int, total int) string {
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
func (s *search) choose(i, from, remaining int, taken slots, value int) {
	if remaining == 0 {
		s.next(i+1, taken, value)
		return
	}
	for n := from; n <= len(s.places[i])-remaining; n++ {
		p := s.places[i][n]
		if taken&p.slots != 0 {
			continue
		}
		if s.visits++; s.found && s.visits > maxVisits {
			return
		}
		s.picked = append(s.picked, pick{request: i, place: n})
		s.choose(i, n+1, remaining-1, taken|p.slots, value+p.value)
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

// ProfileError is a profile that a GPU does not have.
type ProfileError struct {
	Device gpu.Device
	Name   string // as it was asked for
	Why    string // empty: the GPU has no profile of that name
}

// Error says which GPU has no such profile and which profiles it has.
func (e *ProfileError) Error() string {
	switch {
	case e.Why != "":
		return fmt.Sprintf("%s cannot have profile %s: %s", e.Device, e.Name, e.Why)
	case len(e.Device.Profiles) == 0 && !e.Device.MIGCapable:
		return fmt.Sprintf("%s has no MIG profile %s, for it has no MIG", e.Device, e.Name)
	case len(e.Device.Profiles) == 0:
		return fmt.Sprintf("%s has no MIG profile %s: the driver lists none while MIG mode is off", e.Device, e.Name)
	}
	names := make([]string, 0, len(e.Device.Profiles))
	for _, p := range e.Device.SmallestFirst() {
		names = append(names, p.Name)
	}
	return fmt.Sprintf("%s has no MIG profile %s; it has %s", e.Device, e.Name, strings.Join(names, ", "))
}

// FitError is a set of instances that does not fit on a GPU, even on the empty one.
type FitError struct {
	Device gpu.Device
	Want   map[string]int
	Why    string
	Fits   map[string]int // the part of Want that fits when the largest are placed first
}

// Error says what was asked of which GPU, why it does not fit and how much of it would.
func (e *FitError) Error() string {
	msg := fmt.Sprintf("%s cannot hold %s: %s", e.Device, counts(e.Want), e.Why)
	if len(e.Fits) == 0 {
		return msg
	}
	return fmt.Sprintf("%s; %s would fit", msg, counts(e.Fits))
}

// counts writes instances by profile, such as "2 × 1g.5gb + 1 × 3g.20gb".
func counts(instances map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(instances)) {
		if n := instances[name]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d × %s", n, name))
		}
	}
	return strings.Join(parts, " + ")
}

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
