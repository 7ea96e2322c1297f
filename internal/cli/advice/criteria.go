// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// headroom is how much more memory than its peak a container must have: a past peak is no bound on the next one.
const headroom = 1.1

// fullLoad is the utilization of a GPU that always works.
const fullLoad = 1.0

const mebibyte = 1 << 20

// Criterion is a criterion of docs/choosing.md.
type Criterion struct {
	// Name is the name in docs/choosing.md.
	Name string
	// Note says that the criterion speaks against nothing.
	Note bool
	// Against returns what the criterion has against an option, or to note about it; empty: nothing.
	Against func(Fleet, Option) string
}

// Criteria are all criteria, in the order in which their reasons are printed.
func Criteria() []Criterion {
	return []Criterion{
		{Name: "EnoughRoom", Against: enoughRoom},
		{Name: "SeveralGPUs", Against: severalGPUs},
		{Name: "MemoryKnown", Against: memoryKnown},
		{Name: "MemoryFits", Against: memoryFits},
		{Name: "MemoryTogether", Against: memoryTogether},
		{Name: "ComputeFits", Against: computeFits},
		{Name: "TakesTurns", Against: takesTurns},
		{Name: "OneTenant", Against: oneTenant},
		{Name: "Isolates", Note: true, Against: isolates},
		{Name: "ComputeKnown", Note: true, Against: computeKnown},
		{Name: "UsersUnknown", Note: true, Against: usersUnknown},
	}
}

// fits reports whether a share has the memory that a container needs. One of which the memory is not known fits none
// that is limited.
func (c Container) fits(s Share) bool {
	return c.MemoryBytes != nil && s.MemoryMiB > 0 && float64(*c.MemoryBytes)*headroom <= float64(s.MemoryMiB*mebibyte)
}

// works reports whether a share has the multiprocessors that a container mostly keeps at work, as far as that is known.
func (c Container) works(s Share) bool { return c.Compute95 == nil || *c.Compute95 <= s.Compute }

func enoughRoom(f Fleet, o Option) string {
	if room := o.room(f); room < f.Concurrent {
		return fmt.Sprintf("it has room for %d, and %d were held at the same time", room, f.Concurrent)
	}
	return ""
}

func severalGPUs(f Fleet, o Option) string {
	several := f.names(func(c Container) bool { return c.Held > 1 })
	if len(several) == 0 || o.Sharing.Strategy == v1alpha1.StrategyExclusive {
		return ""
	}
	return "containers that use several GPUs at the same time need whole ones: " + format.List(several)
}

func memoryKnown(f Fleet, o Option) string {
	unknown := f.names(func(c Container) bool { return c.MemoryBytes == nil })
	switch {
	case o.Sharing.Strategy == v1alpha1.StrategyExclusive:
		return ""
	case f.Device.MemoryMiB == 0:
		return "the driver does not report the memory of the GPU"
	case len(unknown) > 0:
		return "the driver did not report the memory of " + format.List(unknown)
	}
	return ""
}

// memoryFits is for shares that limit the memory.
func memoryFits(f Fleet, o Option) string {
	if o.Sharing.Strategy != v1alpha1.StrategyMIG && o.Sharing.Strategy != v1alpha1.StrategyMPS {
		return ""
	}
	outside := func(c Container) bool {
		return c.MemoryBytes != nil && !slices.ContainsFunc(o.Shares, c.fits)
	}
	count, peak := map[string]int{}, map[string]int64{}
	for _, c := range f.Containers {
		if outside(c) {
			count[c.Namespace]++
			peak[c.Namespace] = max(peak[c.Namespace], *c.MemoryBytes)
		}
	}
	var parts []string
	for _, namespace := range slices.Sorted(maps.Keys(count)) {
		parts = append(parts, fmt.Sprintf("%s of namespace %s (%s)", counted(count[namespace], "container"), namespace, gibibytes(peak[namespace])))
	}
	if len(parts) == 0 {
		return ""
	}
	largest := slices.MaxFunc(o.Shares, func(a, b Share) int { return int(a.MemoryMiB - b.MemoryMiB) })
	return fmt.Sprintf("%s would not fit %s, which has %s", format.List(parts), largest.Name, gibibytes(largest.MemoryMiB*mebibyte))
}

// memoryTogether is for time-slicing, which limits no memory: any containers can meet on a GPU.
func memoryTogether(f Fleet, o Option) string {
	if o.Sharing.Strategy != v1alpha1.StrategyTimeSlicing || f.Device.MemoryMiB == 0 {
		return ""
	}
	var peaks []float64
	for _, c := range f.Containers {
		if c.MemoryBytes != nil {
			peaks = append(peaks, float64(*c.MemoryBytes))
		}
	}
	n, sum := largest(peaks, o.Shares[0].Count)
	if sum*headroom <= float64(f.Device.MemoryMiB*mebibyte) {
		return ""
	}
	return fmt.Sprintf("the %d largest containers used %s together, and a GPU has %s", n, gibibytes(int64(sum)), gibibytes(f.Device.MemoryMiB*mebibyte))
}

// computeFits is for shares that limit the multiprocessors.
func computeFits(f Fleet, o Option) string {
	if o.Sharing.Strategy != v1alpha1.StrategyMIG && o.Sharing.Strategy != v1alpha1.StrategyMPS {
		return ""
	}
	busy := f.names(func(c Container) bool {
		shares := slices.DeleteFunc(slices.Clone(o.Shares), func(s Share) bool { return c.MemoryBytes != nil && !c.fits(s) })
		return len(shares) > 0 && !slices.ContainsFunc(shares, c.works)
	})
	if len(busy) == 0 {
		return ""
	}
	most := slices.MaxFunc(o.Shares, func(a, b Share) int { return int(percent * (a.Compute - b.Compute)) })
	return fmt.Sprintf("%s would take longer: they use more of the multiprocessors in 5 of 100 samples than the %s of %s",
		format.List(busy), percentage(most.Compute), most.Name)
}

// takesTurns is for time-slicing, under which busy containers wait for each other.
func takesTurns(f Fleet, o Option) string {
	if o.Sharing.Strategy != v1alpha1.StrategyTimeSlicing {
		return ""
	}
	var busy []float64
	for _, c := range f.Containers {
		if c.Compute95 != nil {
			busy = append(busy, *c.Compute95)
		}
	}
	n, sum := largest(busy, o.Shares[0].Count)
	if sum <= fullLoad {
		return ""
	}
	return fmt.Sprintf("the %d busiest containers would wait for each other: together they use %s of the multiprocessors", n, percentage(sum))
}

// oneTenant is for MPS, whose clients end together.
func oneTenant(f Fleet, o Option) string {
	if namespaces := f.namespaces(); o.Sharing.Strategy == v1alpha1.StrategyMPS && len(namespaces) > 1 {
		return "a fault of one client ends all, and the containers belong to several namespaces: " + format.List(namespaces)
	}
	return ""
}

func isolates(_ Fleet, o Option) string {
	switch o.Sharing.Strategy {
	case v1alpha1.StrategyMIG:
		return "isolates memory, computing time and faults"
	case v1alpha1.StrategyMPS:
		return "limits memory and threads, and does not isolate faults"
	case v1alpha1.StrategyTimeSlicing:
		return "isolates nothing; a memory guard reports containers over their share"
	case v1alpha1.StrategyExclusive:
	}
	return ""
}

func computeKnown(f Fleet, o Option) string {
	unknown := f.names(func(c Container) bool { return c.Compute95 == nil })
	if len(unknown) == 0 || o.Sharing.Strategy == v1alpha1.StrategyExclusive {
		return ""
	}
	return fmt.Sprintf("rests on memory alone for %s without a reported utilization of the multiprocessors", counted(len(unknown), "container"))
}

func usersUnknown(_ Fleet, o Option) string {
	if o.Sharing.Strategy != v1alpha1.StrategyMPS {
		return ""
	}
	return "not known: whether the pods run as one user ID, as MPS needs without multiUser"
}

// names are the containers of which something is so.
func (f Fleet) names(is func(Container) bool) []string {
	var names []string
	for _, c := range f.Containers {
		if is(c) {
			names = append(names, nameOf(c))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (f Fleet) namespaces() []string {
	set := map[string]bool{}
	for _, c := range f.Containers {
		set[c.Namespace] = true
	}
	for _, other := range f.Others {
		set[other] = true
	}
	return slices.Sorted(maps.Keys(set))
}

// largest sums up the largest values, so many at the most.
func largest(values []float64, most int) (n int, sum float64) {
	slices.SortFunc(values, func(a, b float64) int { return cmp.Compare(b, a) })
	n = min(len(values), most)
	for _, v := range values[:n] {
		sum += v
	}
	return n, sum
}
