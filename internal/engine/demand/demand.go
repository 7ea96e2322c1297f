// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package demand decides which MIG instances GPUs should have for the pods that wait for them. It moves nothing that
// runs: it makes use of free room and of instances that have been idle long enough. It is pure, and what it returns does
// not depend on the order of what it is given.
package demand

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

const (
	// Hold is how long after a disruptive change of a GPU none of its instances is destroyed again.
	Hold = 5 * time.Minute
	// Aged is how long a pod waits before it goes before younger ones of its priority.
	Aged = 10 * time.Minute
)

// Pool is the GPUs that a policy lets follow demand.
type Pool struct {
	GPUs     []GPU
	Profiles []string       // that may be made, as the policy names them: 3g, 3g.20gb; 8 at most
	Reserve  map[string]int // idle instances that changes keep free, by the names of Profiles
	Idle     time.Duration  // that an instance is idle before it may be destroyed
	Rest     time.Duration  // that a GPU is unused before it returns to its resting layout
	Budget   int            // nodes that may be tainted for it; negative: all
}

// GPU is a GPU of a pool.
type GPU struct {
	Node, UUID string
	Model      *gpu.Device // its profiles; GPUs that can hold the same share one
	Instances  []Instance
	Changed    time.Time      // last disruptive change
	Frozen     bool           // nothing of it may be changed now
	Withheld   bool           // pods are given none of its instances now
	Resting    map[string]int // instances of the resting layout, by exact profile; nil: none
}

// Instance is an instance that a GPU has, or that is being made.
type Instance struct {
	gpu.Instance

	Holder    string    // namespace/name of the pod that has it; empty: idle
	IdleSince time.Time // zero: not known, so it is not destroyed
}

// Class is pods that ask for the same.
type Class struct {
	Asks     map[string]int  // instances that each needs on one node, by exact profile
	Nodes    map[string]bool // that would take the pods but for the instances; nil: all
	Priority int32
	Oldest   time.Time // since when the first has been waiting
	Pods     int
	BackOff  time.Time // until then nothing is changed for them
}

// Reason is why pods wait.
type Reason string

// The reasons.
const (
	NotAllowed Reason = "NotAllowed" // the policy does not let that profile be made, or no GPU of the nodes that would take the pod can hold it
	BackOff    Reason = "BackOff"    // what was made for such pods before was not used
	Budget     Reason = "Budget"     // too many nodes are unavailable
	Held       Reason = "Held"       // the instances that would have to go were used a short time ago
	Reserve    Reason = "Reserve"    // only the reserve would have to go
	Changing   Reason = "Changing"   // a change of the GPUs is under way or they must not be changed
	NoIdleRoom Reason = "NoIdleRoom" // pods have what would have to go
)

// Decision is what should be changed, and what becomes of each class.
type Decision struct {
	Changes  []Change // by node and UUID
	Outcomes []Outcome
	Next     time.Time // when to decide again at the latest; zero: when something changes
}

// Change is what one GPU should have instead of what it has.
type Change struct {
	Node, UUID      string
	Destroy, Create []gpu.Instance // by placement
	Classes         []int          // for which; none: the GPU returns to its resting layout, or the reserve is refilled
}

// Disruptive reports whether the node takes no GPU pod meanwhile.
func (c Change) Disruptive() bool { return len(c.Destroy) > 0 }

// Outcome is what becomes of the pods of a class, in the order of the classes given.
type Outcome struct {
	Ready    int // instances are idle for them, or in the making: the scheduler's turn
	Offered  int // of these: on GPUs that are not Withheld
	Planned  int // the changes make instances for them
	Unmet    int
	Reason   Reason    // of those unmet
	Until    time.Time // Held, BackOff: nothing is done before
	Blockers []string  // NoIdleRoom: pods of the GPU where the fewest hold what would have to go
}

// Decide returns what to change so that most pods can start: of the highest priority first, then those that have waited
// for Aged. Among equals it taints the fewest nodes, changes the fewest GPUs, destroys the fewest instances, creates the
// fewest, and leaves the least fragmentation. Up to 128 GPUs it compares all ways, of which it looks at no more than
// maxVisits; beyond, each pod takes the best that the pods before it leave.
func (m *Memory) Decide(now time.Time, pool Pool, classes []Class) Decision {
	m.begin()
	c := newChooser(m, now, pool, classes, relaxed{})
	d := Decision{Outcomes: make([]Outcome, len(classes))}
	chosen := c.choose(c.items(d.Outcomes))
	c.assign(chosen, &d)
	c.explain(chosen, &d)
	c.rest(&d)
	slices.SortFunc(d.Changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.UUID, b.UUID))
	})
	return d
}

// item is one pod, or an instance of the reserve.
type item struct {
	class int   // none: the reserve
	asks  []int // numbers of profiles in chooser.asked
	tier  int   // 0 is served first
	size  int   // memory slices
}

const none = -1

// items are the pods in the order in which they are served, those that the pool cannot serve in any case left out, and
// then what the reserve lacks.
func (c *chooser) items(outcomes []Outcome) (items []item) {
	classes := c.classes
	order := make([]int, 0, len(classes))
	for n := range classes {
		order = append(order, n)
	}
	slices.SortFunc(order, func(a, b int) int { return c.byTurn(classes[a], classes[b]) })
	tier := none
	for n, at := range order {
		class := classes[at]
		if n == 0 || c.byTier(classes[order[n-1]], class) != 0 {
			tier++
		}
		outcomes[at].Unmet = class.Pods
		one := item{class: at, tier: tier, asks: c.numbers(class.Asks), size: c.sizeOf(class.Asks)}
		exact := len(one.asks) > 1 && len(c.places) <= maxExact // the search finds more ways than possible
		if class.BackOff.After(c.now) || !exact && !c.possible(one) {
			continue
		}
		items = append(items, slices.Repeat([]item{one}, max(0, min(class.Pods, c.capacity)))...)
	}
	for _, name := range slices.Sorted(maps.Keys(c.pool.Reserve)) {
		if exact := c.exactly(name); len(exact) > 0 { // of GPUs of several products, the first
			one := item{class: none, tier: tier + 1, asks: exact[:1]}
			items = append(items, slices.Repeat([]item{one}, max(0, min(c.pool.Reserve[name], c.capacity)))...)
		}
	}
	return items
}

// byTier orders classes by what is served before what.
func (c *chooser) byTier(a, b Class) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(c.young(a), c.young(b)))
}

func (c *chooser) young(a Class) int {
	if c.now.Sub(a.Oldest) >= Aged {
		return 0
	}
	return 1
}

// byTurn orders classes of a tier by size, since large ones find room less easily, and then by age and content.
func (c *chooser) byTurn(a, b Class) int {
	return cmp.Or(c.byTier(a, b), cmp.Compare(c.sizeOf(b.Asks), c.sizeOf(a.Asks)), a.Oldest.Compare(b.Oldest),
		cmp.Compare(text(a), text(b)))
}

func text(a Class) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(a.Asks)) {
		parts = append(parts, name, string(rune('0'+a.Asks[name])))
	}
	return strings.Join(append(parts, slices.Sorted(maps.Keys(a.Nodes))...), " ")
}

// assign reports what was chosen: the changes, and which pods they are for.
func (c *chooser) assign(chosen []placed, d *Decision) {
	kept := map[[2]int]int{} // instances that are there, by GPU and profile of the GPU
	classes := map[int][]int{}
	for _, p := range chosen {
		ready, offered := true, 1
		for n, g := range p.gpus {
			of := c.places[g]
			if of.gpu.Withheld {
				offered = 0
			}
			profile := of.table.number(c.asked[p.asks[n]])
			key := [2]int{g, profile}
			if kept[key]++; kept[key] > of.option.kept(profile) {
				ready = false
				if p.class != none && !slices.Contains(classes[g], p.class) {
					classes[g] = append(classes[g], p.class)
				}
			}
		}
		if p.class == none {
			continue
		}
		outcome := &d.Outcomes[p.class]
		outcome.Unmet--
		if ready {
			outcome.Ready, outcome.Offered = outcome.Ready+1, outcome.Offered+offered
		} else {
			outcome.Planned++
		}
	}
	for g, p := range c.places {
		if !p.option.changes() {
			continue
		}
		slices.Sort(classes[g])
		change := Change{Node: p.gpu.Node, UUID: p.gpu.UUID, Create: p.option.create, Classes: classes[g]}
		for _, start := range p.option.destroy {
			change.Destroy = append(change.Destroy, p.at(start).Instance)
		}
		d.Changes = append(d.Changes, change)
	}
}
