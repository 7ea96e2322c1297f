// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func init() {
	more = append(more,
		contender{"on demand, idle 5 min", playing(func() player { return &follower{idle: 5 * time.Minute} })},
		contender{"on demand, idle 30 s", playing(func() player { return &follower{idle: 30 * time.Second} })},
	)
}

// Pods that come together are decided on together.
const (
	settle     = 2 * time.Second
	settleMost = 10 * time.Second
)

// follower applies what the product decides.
type follower struct {
	idle         time.Duration
	memory       demand.Memory
	waits        int
	opened, last time.Duration
	next         time.Duration
}

func (f *follower) begin(*world) {}

// epoch is when a world begins, so long ago that the first instances have been idle.
func epoch() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) }

func (f *follower) look(w *world) time.Duration {
	total := 0
	for _, n := range w.lengths() {
		total += n
	}
	switch {
	case total > f.waits && f.waits == 0:
		f.opened, f.last = w.now, w.now
	case total > f.waits:
		f.last = w.now
	}
	f.waits = total
	if total == 0 && w.now < f.next {
		return f.next
	}
	if ready := min(f.last+settle, f.opened+settleMost); total > 0 && w.now < ready {
		return ready
	}
	f.opened = w.now
	return f.decide(w)
}

func (f *follower) decide(w *world) time.Duration {
	now := epoch().Add(w.now)
	pool := demand.Pool{Profiles: []string{"1g", "2g", "3g", "4g", "7g"}, Idle: f.idle, Budget: -1}
	for _, c := range w.cards {
		pool.GPUs = append(pool.GPUs, f.seen(c))
	}
	d := f.memory.Decide(now, pool, f.classes(w))
	cuts := make([][]cut, len(w.nodes))
	for _, change := range d.Changes {
		var number int
		_, _ = fmt.Sscanf(change.UUID, "%d", &number)
		c := cut{card: w.cards[number], create: change.Create}
		for _, i := range change.Destroy {
			at := slices.IndexFunc(c.card.instances, func(o *instance) bool { return o.ID == i.ID })
			c.destroy = append(c.destroy, c.card.instances[at])
		}
		cuts[c.card.node.index] = append(cuts[c.card.node.index], c)
	}
	for n, list := range cuts {
		if len(list) > 0 {
			w.repartition(w.nodes[n], list, slices.ContainsFunc(list, func(c cut) bool { return len(c.destroy) > 0 }))
		}
	}
	f.next = w.trace.span
	if !d.Next.IsZero() {
		f.next = d.Next.Sub(epoch())
	}
	return f.next
}

// seen is a GPU as the controller knows it.
func (f *follower) seen(c *card) demand.GPU {
	g := demand.GPU{
		Node: fmt.Sprintf("%03d", c.node.index), UUID: fmt.Sprintf("%05d", c.index), Model: model(), Frozen: c.node.busy,
		Changed: epoch().Add(c.changed), Resting: resting().wanted(),
	}
	for _, i := range c.instances {
		of := demand.Instance{Instance: i.Instance, IdleSince: epoch().Add(i.since)}
		if i.pod != none {
			of.Holder = fmt.Sprint("pods/", i.pod)
		}
		g.Instances = append(g.Instances, of)
	}
	return g
}

// classes are the pods that wait, those that have aged apart.
func (f *follower) classes(w *world) (classes []demand.Class) {
	for profile, waiting := range w.waiting {
		aged, _ := slices.BinarySearchFunc(waiting, w.now-demand.Aged, func(pod int, t time.Duration) int {
			return cmp.Compare(w.trace.pods[pod].arrival, t+1)
		})
		for _, part := range [][]int{waiting[:aged], waiting[aged:]} {
			if len(part) > 0 {
				classes = append(classes, demand.Class{
					Asks: map[string]int{names()[profile]: 1}, Oldest: epoch().Add(w.trace.pods[part[0]].arrival), Pods: len(part),
				})
			}
		}
	}
	return classes
}

var theModel gpu.Device

// model is one for all GPUs.
func model() *gpu.Device {
	if theModel.Product == "" {
		theModel = theGPU()
	}
	return &theModel
}
