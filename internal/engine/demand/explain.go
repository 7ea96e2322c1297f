// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"maps"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// MostBlockers bounds the pods that an outcome names.
const MostBlockers = 3

// explain says of each class with pods that wait on why they do: the first thing that would have to be left out of
// account so that one more of them could be served.
func (c *chooser) explain(chosen []placed, d *Decision) {
	levels := c.levels()
	for n, class := range c.classes {
		o := &d.Outcomes[n]
		if o.Unmet == 0 {
			continue
		}
		one := item{class: n, asks: c.numbers(class.Asks)}
		if o.Reason = c.never(class); o.Reason != "" {
			continue
		}
		if class.BackOff.After(c.now) {
			o.Reason, o.Until = BackOff, class.BackOff
			d.look(o.Until)
			continue
		}
		for _, l := range levels {
			if l.chooser == nil {
				l.chooser = c.again(chosen, l.relaxed)
			}
			if !l.chooser.possible(one) {
				continue
			}
			if o.Reason = l.reason; o.Reason == Held {
				o.Until = l.chooser.until(one)
			}
			break
		}
		if o.Reason == "" {
			o.Reason, o.Blockers = NoIdleRoom, c.blockers(class)
		}
		d.look(o.Until)
	}
}

// level is a reason, and what must be left out of account for it not to hold.
type level struct {
	relaxed relaxed
	reason  Reason
	chooser *chooser
}

// levels are those that can hold in the pool, each beside the ones before it.
func (c *chooser) levels() (levels []*level) {
	young, frozen := false, false
	for _, p := range c.places {
		frozen = frozen || p.gpu.Frozen
		for n, i := range p.instances {
			young = young || p.states[n] == idle && (i.IdleSince.IsZero() || goes(c.pool, p.gpu, i).After(c.now))
		}
	}
	r := relaxed{}
	add := func(holds bool, reason Reason, relax *bool) {
		if *relax = true; holds {
			levels = append(levels, &level{relaxed: r, reason: reason})
		}
	}
	add(c.pool.Budget >= 0, Budget, &r.budget)
	add(young, Held, &r.held)
	add(len(c.pool.Reserve) > 0, Reserve, &r.reserve)
	add(frozen, Changing, &r.frozen)
	return levels
}

// look asks for a decision at a time.
func (d *Decision) look(at time.Time) {
	if !at.IsZero() && (d.Next.IsZero() || at.Before(d.Next)) {
		d.Next = at
	}
}

// never says why no change can ever serve a class; empty if one could.
func (c *chooser) never(class Class) Reason {
	for _, p := range c.places {
		can := admits(class.Nodes, p.gpu.Node)
		for name := range class.Asks {
			at := p.table.number(name)
			can = can && at >= 0 && at < p.table.made
		}
		if can {
			return ""
		}
	}
	return NotAllowed
}

// again is the same pool with what was chosen, but for what is left out of account.
func (c *chooser) again(chosen []placed, r relaxed) *chooser {
	o := newChooser(c.memory, c.now, c.pool, c.classes, r)
	gone := c.gone(chosen)
	if r.reserve {
		chosen = slices.DeleteFunc(slices.Clone(chosen), func(p placed) bool { return p.class == none })
	}
	o.replay(chosen, gone)
	return o
}

// until is the earliest time at which what would have to go for a pod may go.
func (c *chooser) until(i item) (earliest time.Time) {
	for _, p := range c.places {
		if !admits(c.nodesOf(i), p.gpu.Node) {
			continue
		}
		number := p.table.number(c.asked[i.asks[0]])
		if number < 0 {
			continue
		}
		needs := p.needs
		needs[number]++
		for _, o := range p.table.options { // the least costly one may have to wait longer than another
			if at := p.waits(c.pool, o); o.offers.covers(needs) && at.After(c.now) && (earliest.IsZero() || at.Before(earliest)) {
				earliest = at
			}
		}
	}
	return earliest
}

// waits is until when an option has to wait for instances that may not go yet.
func (p *place) waits(pool Pool, o *option) (at time.Time) {
	for _, start := range o.destroy {
		if t := goes(pool, p.gpu, p.at(start)); t.After(at) {
			at = t
		}
	}
	return at
}

// blockers are the pods that hold what lies where an instance could lie for a pod, at the place where they are fewest.
func (c *chooser) blockers(class Class) (pods []string) {
	found := false
	for _, p := range c.places {
		if !admits(class.Nodes, p.gpu.Node) {
			continue
		}
		for name := range class.Asks {
			profile, _ := p.gpu.Model.Profile(name)
			for _, start := range profile.Starts {
				there := holders(p.instances, gpu.Placement{Start: start, Size: profile.Size})
				if !found || len(there) < len(pods) {
					pods, found = there, true
				}
			}
		}
	}
	return pods[:min(len(pods), MostBlockers)]
}

func holders(instances []Instance, at gpu.Placement) (pods []string) {
	for _, i := range instances {
		if i.Holder != "" && i.Placement.Overlaps(at) && !slices.Contains(pods, i.Holder) {
			pods = append(pods, i.Holder)
		}
	}
	return pods
}

// rest returns GPUs that were not used for a long time to their resting layout, if no pod is given any of their instances. That others wait
// does not matter: these GPUs are of no use to them.
func (c *chooser) rest(d *Decision) {
	for _, p := range c.places {
		if p.gpu.Resting == nil || p.gpu.Frozen || p.needs != (tally{}) || p.option.changes() {
			continue
		}
		at, unused := p.unused(c.pool)
		switch {
		case !unused || maps.Equal(numbersOf(p.instances), p.gpu.Resting):
		case at.After(c.now):
			d.look(at)
		default:
			c.restore(p, d)
		}
	}
}

// unused reports whether no pod has an instance of a GPU, and when all may be destroyed and it has been so for a time.
func (p *place) unused(pool Pool) (at time.Time, is bool) {
	for _, i := range p.instances {
		if i.Holder != "" || i.Partial || i.IdleSince.IsZero() {
			return at, false
		}
		at = slices.MaxFunc([]time.Time{at, i.IdleSince.Add(pool.Rest), goes(pool, p.gpu, i)}, time.Time.Compare)
	}
	return at, len(p.instances) > 0
}

func numbersOf(instances []Instance) map[string]int {
	numbers := map[string]int{}
	for _, i := range instances {
		numbers[i.Profile]++
	}
	return numbers
}

// restore returns a GPU to its resting layout, if the budget allows it.
func (c *chooser) restore(p *place, d *Decision) {
	device := *p.gpu.Model
	device.State.Instances = nil
	for _, i := range p.instances {
		device.State.Instances = append(device.State.Instances, i.Instance)
	}
	packing, err := mig.Pack(device, p.gpu.Resting)
	if err != nil {
		return
	}
	change := Change{Node: p.gpu.Node, UUID: p.gpu.UUID, Destroy: packing.Destroy, Create: packing.Create}
	if !c.keepsReserve(change) {
		return
	}
	if node := c.nodes[p.node]; change.Disruptive() && node.tainted == 0 {
		if !c.mayTaint() {
			return
		}
		node.tainted++
		c.tainted++
	}
	for _, i := range change.Destroy {
		if _, reserved := c.spare[i.Profile]; reserved {
			c.spare[i.Profile]--
		}
	}
	d.Changes = append(d.Changes, change)
}

// keepsReserve reports whether what a change destroys is idle beyond the reserve.
func (c *chooser) keepsReserve(change Change) bool {
	lost := map[string]int{}
	for _, i := range change.Destroy {
		lost[i.Profile]++
	}
	for name, n := range lost {
		if spare, reserved := c.spare[name]; reserved && n > spare {
			return false
		}
	}
	return true
}
