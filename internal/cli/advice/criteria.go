// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"

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
		{Name: "OneUser", Against: oneUser},
		{Name: "AsSafe", Against: asSafe},
		{Name: "NodesTakeIt", Against: nodesTakeIt},
		{Name: "NamesStay", Against: namesStay},
		{Name: "LabelsStay", Against: labelsStay},
		{Name: "Isolates", Note: true, Against: isolates},
		{Name: "ComputeKnown", Note: true, Against: computeKnown},
	}
}

// fits reports whether a share has the memory that a container needs. One of which the memory is not known fits none
// that is limited.
func (c Container) fits(s Share) bool {
	return c.MemoryBytes != nil && s.MemoryMiB > 0 && float64(*c.MemoryBytes)*headroom <= float64(s.MemoryMiB*mebibyte)
}

// works reports whether a share has the multiprocessors that a container mostly keeps at work, as far as that is known.
func (c Container) works(s Share) bool { return c.Compute95 == nil || *c.Compute95 <= s.Compute }

// enoughRoom is for each node: a pod may be bound to its node.
func enoughRoom(f Fleet, o Option) string {
	for _, n := range f.Nodes {
		room, held := o.perGPU()*healthyGPUs(n), f.held[n.Name]
		switch {
		case room >= held:
		case len(f.Nodes) == 1:
			return fmt.Sprintf("it has room for %d, and %d were held at the same time", room, held)
		default:
			return fmt.Sprintf("node %s has room for %d, and %d were held there at the same time", n.Name, room, held)
		}
	}
	return ""
}

func severalGPUs(f Fleet, o Option) string {
	several := f.names(func(c Container) bool { return c.Held > 1 })
	if s := f.present.Strategy; s == "" || s == v1alpha1.StrategyExclusive {
		several = append(several, f.asking(func(n int64) bool { return n > 1 })...)
	}
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

// memoryTogether is for time-slicing, which limits no memory, and for MPS whose limits together exceed the memory: any containers can
// meet on a GPU.
func memoryTogether(f Fleet, o Option) string {
	limited := o.Sharing.Strategy != v1alpha1.StrategyTimeSlicing &&
		(o.Sharing.Strategy != v1alpha1.StrategyMPS || o.Shares[0].MemoryMiB*int64(o.Shares[0].Count) <= f.Device.MemoryMiB)
	if limited || f.Device.MemoryMiB == 0 {
		return ""
	}
	var peaks []float64
	for _, c := range f.Containers {
		if c.MemoryBytes != nil {
			peaks = append(peaks, float64(*c.MemoryBytes))
		}
	}
	n, sum := largest(peaks, o.Shares[0].Count)
	memory, guarded := float64(f.Device.MemoryMiB*mebibyte), ""
	if s := o.Sharing.TimeSlicing; s != nil && s.Memory.Guarded() {
		m := s.Memory
		memory *= 1 - float64(m.Guard.FreeBelowPercent)/percent
		guarded = fmt.Sprintf(", of which the memory guard keeps %d %% free", m.Guard.FreeBelowPercent)
	}
	if sum*headroom <= memory {
		return ""
	}
	return fmt.Sprintf("the %d largest containers used %s together, and a GPU has %s%s", n, gibibytes(int64(sum)), gibibytes(f.Device.MemoryMiB*mebibyte), guarded)
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

// oneTenant is for MPS, whose clients end together, and for time-slicing of GPUs that are not time-sliced yet.
func oneTenant(f Fleet, o Option) string {
	namespaces := f.namespaces()
	switch s := o.Sharing.Strategy; {
	case len(namespaces) < 2: //nolint:mnd // several
	case s == v1alpha1.StrategyMPS:
		return "a fault of one client ends all, and the containers belong to several namespaces: " + format.List(namespaces)
	case s == v1alpha1.StrategyTimeSlicing && f.present.Strategy != s:
		return "it takes the isolation from each other from containers of several namespaces: " + format.List(namespaces)
	}
	return ""
}

// oneUser is for MPS that is new on the nodes: it serves one user ID at a time, and the pods of another wait in CUDA.
func oneUser(f Fleet, o Option) string {
	if o.Sharing.Strategy != v1alpha1.StrategyMPS || f.present.Strategy == v1alpha1.StrategyMPS {
		return ""
	}
	users := map[int64]bool{}
	unknown := f.names(func(c Container) bool { return f.podOf(c) == nil })
	for _, name := range slices.Sorted(maps.Keys(f.pods)) {
		if user := f.pods[name].RunsAs; user != nil {
			users[*user] = true
		} else {
			unknown = append(unknown, name)
		}
	}
	switch {
	case len(unknown) > 0:
		return "it serves one user ID at a time, and that of these is not known, because no securityContext.runAsUser says it or the pod has ended: " + format.List(unknown)
	case len(users) > 1:
		return fmt.Sprintf("it serves one user ID at a time, and the pods have %d", len(users))
	}
	return ""
}

// asSafe is for a way that isolates less than the one that a policy asks for now.
func asSafe(f Fleet, o Option) string {
	if isolation(o.Sharing.Strategy) >= isolation(f.present.Strategy) {
		return ""
	}
	return fmt.Sprintf("policy %s asks for %s, which isolates better", f.Policy, f.present.Strategy)
}

// isolation orders the strategies by what they isolate; 0: none is asked for.
func isolation(s v1alpha1.Strategy) int {
	return 1 + slices.Index([]v1alpha1.Strategy{v1alpha1.StrategyTimeSlicing, v1alpha1.StrategyMPS, v1alpha1.StrategyMIG, v1alpha1.StrategyExclusive}, s)
}

// nodesTakeIt is for what a node would refuse.
func nodesTakeIt(f Fleet, o Option) string {
	for _, n := range f.Nodes {
		if why := o.refused[n.Name]; why != "" {
			return fmt.Sprintf("node %s refuses it: %s", n.Name, why)
		}
	}
	return ""
}

// namesStay is for resources that pods request and that a node would not offer any more, or too few of them, or not so
// many to one pod.
func namesStay(f Fleet, o Option) string {
	for _, n := range f.Nodes {
		want, known := o.offers[n.Name]
		offers := want.Config
		if !known {
			continue // it is refused
		}
		for _, name := range slices.Sorted(maps.Keys(f.requests[n.Name])) {
			offered := offers.Resources[name] * int64(healthyGPUs(n)) / int64(len(n.GPU.Status.Devices))
			if asked := f.requests[n.Name][name]; offered < max(asked, 1) {
				return fmt.Sprintf("pods on node %s request %d %s, and it would offer %d", n.Name, max(asked, 1), name, offered)
			}
			if offers.Replicas[name] > 1 && refusesSeveral(o.Sharing) && !refusesSeveral(f.present) {
				if several := f.asking(func(n int64) bool { return n > 1 }); len(several) > 0 {
					return "a container gets one replica at most, and these request more: " + format.List(several)
				}
			}
		}
	}
	return ""
}

// labelsStay is for pods that select their node by a label that NVIDIA's GPU Feature Discovery writes anew: the product gets the suffix -SHARED
// with replicas that keep their name, and that of the instances with uniform ones (k8s-device-plugin, internal/lm/resource.go).
func labelsStay(f Fleet, o Option) string {
	for _, name := range slices.Sorted(maps.Keys(f.pods)) {
		for _, label := range f.pods[name].SharingLabels {
			if equality.Semantic.DeepEqual(o.Sharing, f.present) || label == labelProduct && suffix(o.Sharing) == suffix(f.present) && suffix(o.Sharing) != ofInstances {
				continue
			}
			return fmt.Sprintf("pod %s selects its node by %s, which changes", name, label)
		}
	}
	return ""
}

const labelProduct, ofInstances = "nvidia.com/gpu.product", "-MIG-"

// suffix is what NVIDIA's label of the product ends with; ofInstances: with the profile.
func suffix(s v1alpha1.Sharing) string {
	renames := s.Advertise != nil && s.Advertise.RenameByDefault != nil && *s.Advertise.RenameByDefault
	switch {
	case s.Strategy == v1alpha1.StrategyMIG:
		return ofInstances
	case s.Strategy == "" || s.Strategy == v1alpha1.StrategyExclusive || renames:
		return ""
	}
	return "-SHARED"
}

// refusesSeveral reports whether NVIDIA's device plugin refuses a container that requests several replicas of a GPU.
func refusesSeveral(s v1alpha1.Sharing) bool {
	return s.MIG == nil && s.RefusesMoreThanOne()
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
	for _, p := range f.pods {
		set[p.Namespace] = true
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
