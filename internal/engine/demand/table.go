// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// maxProfiles is how many profiles a policy may name.
const maxProfiles = 8

// tally is a number of instances by the profiles of a table.
type tally [maxProfiles]uint8

func (t tally) covers(o tally) bool {
	for n := range t {
		if t[n] < o[n] {
			return false
		}
	}
	return true
}

// cost is what is least among ways to serve the same pods, in this order.
type cost struct{ tainted, changed, destroyed, created, growth int }

func (c cost) compare(o cost) int {
	if d := c.compareBounded(o); d != 0 {
		return d
	}
	return c.growth - o.growth
}

// compareBounded leaves out the growth of fragmentation, which may fall again when more is served. It is called most, and
// cmp.Or would compare all.
func (c cost) compareBounded(o cost) int {
	switch {
	case c.tainted != o.tainted:
		return c.tainted - o.tainted
	case c.changed != o.changed:
		return c.changed - o.changed
	case c.destroyed != o.destroyed:
		return c.destroyed - o.destroyed
	}
	return c.created - o.created
}

func (c cost) plus(o cost) cost {
	return cost{c.tainted + o.tainted, c.changed + o.changed, c.destroyed + o.destroyed, c.created + o.created, c.growth + o.growth}
}

func (c cost) minus(o cost) cost {
	return cost{c.tainted - o.tainted, c.changed - o.changed, c.destroyed - o.destroyed, c.created - o.created, c.growth - o.growth}
}

// option is a layout that a GPU can have beside what must stay.
type option struct {
	offers, made tally // idle instances; those of them that are created
	gone         tally // instances of reserved profiles that are destroyed
	create       []gpu.Instance
	destroy      []int // where the instances begin
	cost         cost  // tainted: 1 if it destroys anything
}

func (o *option) changes() bool { return o.cost.changed > 0 }

// kept is how many idle instances of a profile are there already.
func (o *option) kept(profile int) int { return int(o.offers[profile] - o.made[profile]) }

// table is all layouts of GPUs that have the same instances in the same state.
type table struct {
	names    []string // profiles, exact: first those that may be made, then those of which it has idle instances alone
	made     int      // how many of names may be made
	options  []*option
	best     map[wanted]*option
	reserved tally // instances of reserved profiles that may be destroyed
}

// wanted is how many instances an option must offer, and how many of reserved profiles it may destroy.
type wanted struct{ needs, limit tally }

// Memory keeps the layouts that GPUs can have, by what they have, from one decision to the next. It changes no decision.
type Memory struct {
	models []*gpu.Device
	kinds  []kind
	tables map[string]*table
}

// kind is GPUs that can hold the same, of which a policy lets the same be made and reserves the same.
type kind struct {
	model    *gpu.Device
	names    []string
	reserved []string // of names
}

// Model is the one that stands for all GPUs that can hold the same as a GPU, also in former decisions.
func (m *Memory) Model(d *gpu.Device) *gpu.Device {
	same := func(p, q gpu.Profile) bool {
		return p.Name == q.Name && p.Slices == q.Slices && p.Size == q.Size && p.Max == q.Max && slices.Equal(p.Starts, q.Starts)
	}
	for _, known := range m.models {
		if known.Product == d.Product && slices.EqualFunc(known.Profiles, d.Profiles, same) {
			return known
		}
	}
	m.models = append(m.models, &gpu.Device{Product: d.Product, Profiles: d.Profiles})
	return m.models[len(m.models)-1]
}

// maxTables and maxKinds bound what is kept.
const maxTables, maxKinds = 1 << 12, 1 << 6

func (m *Memory) begin() {
	if len(m.models) > maxKinds {
		m.models = nil
	}
	if len(m.tables) > maxTables || len(m.kinds) > maxKinds || m.tables == nil {
		*m = Memory{models: m.models, tables: map[string]*table{}}
	}
}

// number is that of a kind.
func (m *Memory) number(of kind) uint16 {
	at := slices.IndexFunc(m.kinds, func(k kind) bool {
		return k.model == of.model && slices.Equal(k.names, of.names) && slices.Equal(k.reserved, of.reserved)
	})
	if at < 0 {
		at = len(m.kinds)
		m.kinds = append(m.kinds, of)
	}
	return uint16(at)
}

func (t *table) number(name string) int { return slices.Index(t.names, name) }

// with is the least costly option that offers at least so many instances, and destroys at most so many of reserved
// profiles; nil if there is none.
func (t *table) with(needs, limit tally) *option {
	if found, known := t.best[wanted{needs, limit}]; known {
		return found
	}
	var best *option
	for _, o := range t.options {
		if o.offers.covers(needs) && limit.covers(o.gone) && (best == nil || o.cost.compare(best.cost) < 0) {
			best = o
		}
	}
	t.best[wanted{needs, limit}] = best
	return best
}

// state is what may become of an instance.
type state byte

const (
	stays state = iota // a pod has it
	idle               // it can be given to a pod, but not destroyed
	mayGo
)

// maxFurther is more than the instances that GPUs have.
const maxFurther = 16

// newTable lists the layouts. Frozen: only the one that the GPU has. The first of equal options is the one whose
// instances lie lowest.
func newTable(of kind, instances []Instance, states []state, frozen bool) *table {
	d, names := of.model, of.names
	t := &table{names: slices.Clip(names), made: len(names), best: map[wanted]*option{}}
	t.nameIdle(instances, states)
	all, fixed, free := make([]gpu.Instance, 0, len(instances)), make([]gpu.Instance, 0, len(instances)+maxFurther), []gpu.Instance(nil)
	var offers tally
	for n, i := range instances {
		all = append(all, i.Instance)
		if states[n] == mayGo {
			free = append(free, i.Instance)
			continue
		}
		fixed = append(fixed, i.Instance)
		if at := t.number(i.Profile); states[n] == idle && at >= 0 {
			offers[at]++
		}
	}
	if frozen {
		t.options = []*option{t.asItIs(instances, states)}
		return t
	}
	for _, i := range free {
		if at := t.number(i.Profile); slices.Contains(of.reserved, i.Profile) && at >= 0 {
			t.reserved[at]++
		}
	}
	fragmentation := mig.Fragmentation(*d, all, names)
	err := mig.Beside(*d, fixed, free, names, func(further []gpu.Instance) {
		o := t.option(offers, free, further)
		if slices.ContainsFunc(t.options, func(p *option) bool {
			return p.offers == o.offers && o.gone.covers(p.gone) && p.cost.compareBounded(o.cost) < 0
		}) {
			return // whatever its fragmentation
		}
		o.cost.growth = mig.Fragmentation(*d, append(fixed, further...), names) - fragmentation
		t.options = append(t.options, o)
	})
	if err != nil { // instances that the driver does not describe
		t.options, t.reserved = []*option{t.asItIs(instances, states)}, tally{}
	}
	return t
}

// nameIdle adds the profiles of instances that can be given to pods, though no others of them are made.
func (t *table) nameIdle(instances []Instance, states []state) {
	for n, i := range instances {
		if states[n] != stays && t.number(i.Profile) < 0 && len(t.names) < maxProfiles {
			t.names = append(t.names, i.Profile)
		}
	}
}

func (t *table) asItIs(instances []Instance, states []state) *option {
	o := &option{}
	for n, i := range instances {
		if at := t.number(i.Profile); at >= 0 && states[n] != stays {
			o.offers[at]++
		}
	}
	return o
}

// option is what it takes to have further instances, some of which are there.
func (t *table) option(offers tally, there, further []gpu.Instance) *option {
	o := &option{offers: offers}
	stay := 0
	for _, i := range further {
		at := t.number(i.Profile)
		if at >= 0 {
			o.offers[at]++
		}
		if slices.Contains(there, i) {
			stay++
			continue
		}
		o.made[at]++
		o.create = append(o.create, i)
	}
	o.cost.created = len(o.create)
	if o.cost.destroyed = len(there) - stay; o.cost.destroyed > 0 {
		o.cost.tainted = 1
		for _, i := range there {
			if slices.Contains(further, i) {
				continue
			}
			o.destroy = append(o.destroy, i.Placement.Start)
			if at := t.number(i.Profile); at >= 0 && t.reserved[at] > 0 {
				o.gone[at]++
			}
		}
	}
	if o.cost.destroyed+o.cost.created > 0 {
		o.cost.changed = 1
	}
	return o
}
