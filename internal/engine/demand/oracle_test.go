// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// exact are the profiles of a GPU that names mean.
func exact(d *gpu.Device, names []string) (list []string) {
	for _, name := range names {
		if p, err := mig.Resolve(*d, name); err == nil {
			list = append(list, p.Name)
		}
	}
	slices.Sort(list)
	return list
}

// valid reports whether a GPU can have instances where they lie.
func valid(d *gpu.Device, instances []demand.Instance) bool {
	compute, numbers, extended := 0, map[string]int{}, 0
	for n, i := range instances {
		p, _ := d.Profile(i.Profile)
		compute += p.Slices
		if numbers[p.Name]++; numbers[p.Name] > p.Max {
			return false
		}
		if len(p.Name) > 3 && p.Name[len(p.Name)-3:] == "+me" {
			extended++
		}
		for _, o := range instances[:n] {
			if i.Placement.Overlaps(o.Placement) {
				return false
			}
		}
	}
	return compute <= d.ComputeSlices() && extended <= 1
}

// value is how good a decision is: pods served by tier, then what it costs.
type value struct {
	served []int
	cost   [5]int // nodes tainted, GPUs changed, instances destroyed, created, memory slices that profiles cannot use
}

func (v value) compare(o value) int {
	return cmp.Or(slices.Compare(v.served, o.served), slices.Compare(o.cost[:], v.cost[:]))
}

func older(a, b demand.Class) int {
	aged := func(c demand.Class) int {
		if now.Sub(c.Oldest) >= demand.Aged {
			return 0
		}
		return 1
	}
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(aged(a), aged(b)))
}

// tiersOf numbers the classes by what is served before what.
func tiersOf(classes []demand.Class) (tiers []int, number int) {
	sorted := slices.SortedFunc(slices.Values(classes), older)
	sorted = slices.CompactFunc(sorted, func(a, b demand.Class) bool { return older(a, b) == 0 })
	for _, c := range classes {
		tiers = append(tiers, slices.IndexFunc(sorted, func(o demand.Class) bool { return older(c, o) == 0 }))
	}
	return tiers, len(sorted)
}

func valueOf(p demand.Pool, classes []demand.Class, d demand.Decision) value {
	tiers, number := tiersOf(classes)
	v := value{served: make([]int, number+1)}
	given := map[string]int{}
	for n, o := range d.Outcomes {
		v.served[tiers[n]] += o.Ready + o.Planned
		for name, count := range classes[n].Asks {
			given[name] += count * (o.Ready + o.Planned)
		}
	}
	for name, count := range reserveOf(p) {
		v.served[number] += min(count, idleAfter(p, d, name)-given[name])
	}
	tainted := map[string]bool{}
	for _, c := range d.Changes {
		if v.cost[1]++; len(c.Destroy) > 0 {
			tainted[c.Node] = true
		}
		v.cost[2] += len(c.Destroy)
		v.cost[3] += len(c.Create)
	}
	v.cost[0] = len(tainted)
	for _, g := range p.GPUs {
		var instances []gpu.Instance
		for _, i := range g.Instances {
			instances = append(instances, i.Instance)
		}
		for _, c := range d.Changes {
			if c.UUID == g.UUID {
				instances = slices.DeleteFunc(instances, func(i gpu.Instance) bool {
					return slices.ContainsFunc(c.Destroy, func(o gpu.Instance) bool { return o.Placement == i.Placement })
				})
				instances = append(instances, c.Create...)
			}
		}
		v.cost[4] += mig.Fragmentation(*g.Model, instances, exact(g.Model, p.Profiles))
	}
	return v
}

// reserveOf is what a pool reserves, by exact profile.
func reserveOf(p demand.Pool) map[string]int {
	exactly := map[string]int{}
	for name, count := range p.Reserve {
		exactly[exact(p.GPUs[0].Model, []string{name})[0]] = count
	}
	return exactly
}

// way is a layout that a GPU can have.
type way struct {
	offers map[string]int
	gone   map[string]int // idle instances of reserved profiles that it destroys
	cost   [5]int         // the first: 1 if it destroys anything
}

// placesOf are all places at which instances can be made.
func placesOf(g demand.GPU, names []string) (places []demand.Instance) {
	if g.Frozen {
		return nil
	}
	for _, name := range names {
		profile, _ := g.Model.Profile(name)
		for _, start := range profile.Starts {
			places = append(places, has(g.Model, name, start, "", 0))
		}
	}
	return places
}

// waysOf are all layouts that a GPU can have beside what must stay.
func waysOf(p demand.Pool, g demand.GPU) (ways []way) {
	names := exact(g.Model, p.Profiles)
	var fixed, free []demand.Instance
	for _, i := range g.Instances {
		old := i.Holder == "" && !i.IdleSince.Add(p.Idle).After(now) && !g.Changed.Add(demand.Hold).After(now)
		if old && !g.Frozen {
			free = append(free, i)
		} else {
			fixed = append(fixed, i)
		}
	}
	places := placesOf(g, names)
	var gone map[string]int
	var add func(from int, instances []demand.Instance, created int)
	add = func(from int, instances []demand.Instance, created int) {
		w := way{offers: map[string]int{}, gone: gone}
		var all []gpu.Instance
		for _, i := range instances {
			all = append(all, i.Instance)
			if i.Holder == "" {
				w.offers[i.Profile]++
			}
		}
		w.cost[2] = len(fixed) + len(free) + created - len(instances)
		w.cost[0], w.cost[1] = min(1, w.cost[2]), min(1, w.cost[2]+created)
		w.cost[3], w.cost[4] = created, mig.Fragmentation(*g.Model, all, names)
		ways = append(ways, w)
		for n := from; n < len(places); n++ {
			if more := append(slices.Clone(instances), places[n]); valid(g.Model, more) {
				add(n+1, more, created+1)
			}
		}
	}
	for kept := range 1 << len(free) {
		instances := slices.Clone(fixed)
		gone = map[string]int{}
		for n, i := range free {
			if kept>>n&1 == 1 {
				instances = append(instances, i)
			} else if reserveOf(p)[i.Profile] > 0 {
				gone[i.Profile]++
			}
		}
		add(0, instances, 0)
	}
	return ways
}

// everything tries all ways to serve pods.
type everything struct {
	pool    demand.Pool
	classes []demand.Class
	tiers   []int
	ways    [][]way
	known   []map[string][]*way
	needs   []map[string]int
	pods    []int // classes
	spare   map[string]int
	served  []int
	best    value
}

func oracle(p demand.Pool, classes []demand.Class) value {
	tiers, number := tiersOf(classes)
	e := &everything{pool: p, classes: slices.Clone(classes), tiers: tiers, served: make([]int, number+1), spare: map[string]int{}}
	for name, count := range reserveOf(p) { // the reserve is served last, and what is idle beyond it may go
		e.spare[name] = max(0, idleAfter(p, demand.Decision{}, name)-count)
		e.classes, e.tiers = append(e.classes, demand.Class{Asks: map[string]int{name: 1}, Pods: count}), append(e.tiers, number)
	}
	for _, g := range p.GPUs {
		e.ways = append(e.ways, waysOf(p, g))
		e.known = append(e.known, map[string][]*way{})
		e.needs = append(e.needs, map[string]int{})
	}
	for n, c := range e.classes {
		for range c.Pods {
			e.pods = append(e.pods, n)
		}
	}
	e.best = value{served: slices.Repeat([]int{-1}, number+1)}
	e.next(0)
	return e.best
}

func (e *everything) next(pod int) {
	if pod == len(e.pods) {
		e.offer()
		return
	}
	e.next(pod + 1)
	class := e.classes[e.pods[pod]]
	var asks []string
	for _, name := range slices.Sorted(maps.Keys(class.Asks)) {
		asks = append(asks, slices.Repeat([]string{name}, class.Asks[name])...)
	}
	e.served[e.tiers[e.pods[pod]]]++
	e.serve(pod, asks, "")
	e.served[e.tiers[e.pods[pod]]]--
}

func (e *everything) serve(pod int, asks []string, node string) {
	if len(asks) == 0 {
		e.next(pod + 1)
		return
	}
	class := e.classes[e.pods[pod]]
	for n, g := range e.pool.GPUs {
		if node != "" && g.Node != node || class.Nodes != nil && !class.Nodes[g.Node] {
			continue
		}
		e.needs[n][asks[0]]++
		if len(e.waysFor(n)) > 0 {
			e.serve(pod, asks[1:], g.Node)
		}
		e.needs[n][asks[0]]--
	}
}

// waysFor are the layouts of a GPU that offer what pods need: the least costly for each number of reserved instances that
// it destroys.
func (e *everything) waysFor(n int) []*way {
	key := ""
	for _, name := range slices.Sorted(maps.Keys(e.needs[n])) {
		for range e.needs[n][name] {
			key += name + " "
		}
	}
	if list, known := e.known[n][key]; known {
		return list
	}
	best := map[string]*way{}
	for at, w := range e.ways[n] {
		enough := true
		for name, count := range e.needs[n] {
			enough = enough && w.offers[name] >= count
		}
		lost := fmt.Sprint(w.gone)
		if enough && (best[lost] == nil || slices.Compare(w.cost[:], best[lost].cost[:]) < 0) {
			best[lost] = &e.ways[n][at]
		}
	}
	e.known[n][key] = slices.Collect(maps.Values(best))
	return e.known[n][key]
}

func (e *everything) offer() {
	if slices.Compare(e.served, e.best.served) >= 0 {
		e.combine(make([]*way, 0, len(e.pool.GPUs)), maps.Clone(e.spare))
	}
}

// combine picks a layout for each GPU.
func (e *everything) combine(picked []*way, spare map[string]int) {
	if len(picked) == len(e.pool.GPUs) {
		e.compare(picked)
		return
	}
	for _, w := range e.waysFor(len(picked)) {
		enough := true
		for name, n := range w.gone {
			spare[name] -= n
			enough = enough && spare[name] >= 0
		}
		if enough {
			e.combine(append(picked, w), spare)
		}
		for name, n := range w.gone {
			spare[name] += n
		}
	}
}

func (e *everything) compare(picked []*way) {
	v := value{served: slices.Clone(e.served)}
	tainted := map[string]bool{}
	for n, g := range e.pool.GPUs {
		w := picked[n]
		for at := 1; at < len(v.cost); at++ {
			v.cost[at] += w.cost[at]
		}
		if w.cost[0] > 0 {
			tainted[g.Node] = true
		}
	}
	v.cost[0] = len(tainted)
	if e.pool.Budget >= 0 && len(tainted) > e.pool.Budget {
		return
	}
	if v.compare(e.best) > 0 {
		e.best = v
	}
}
