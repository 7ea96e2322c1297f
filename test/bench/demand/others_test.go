// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// firstFit is NVIDIA's DRA driver with DynamicMIG and kube-scheduler: a pod gets the first placement that is free, of
// nodes, GPUs and placements in the order of their names. The instance is created for the pod and destroyed after it.
type firstFit struct{}

func (firstFit) begin(w *world) {
	for _, c := range w.cards {
		c.instances = nil
	}
	w.ended = func(i *instance) {
		w.at(w.now+w.nvml, func() { i.card.remove(i) })
	}
}

func (firstFit) look(*world) time.Duration { return 0 }

func (firstFit) bind(w *world) {
	var failed [kinds]bool
	for {
		next := none
		for p, waiting := range w.waiting {
			if !failed[p] && len(waiting) > 0 && (next == none || waiting[0] < w.waiting[next][0]) {
				next = p
			}
		}
		if next == none {
			return
		}
		c, at := firstPlace(w, next)
		if c == nil {
			failed[next] = true // the room of others only shrinks it
			continue
		}
		i := w.create(c, gpu.Instance{Profile: names()[next], Placement: at}, w.now)
		c.check()
		w.start(w.waiting[next][0], i, w.now+w.nvml)
		w.waiting[next] = w.waiting[next][1:]
	}
}

func firstPlace(w *world, profile int) (*card, gpu.Placement) {
	p, _ := theGPU().Profile(names()[profile])
	for _, c := range w.cards {
		for _, start := range p.Starts {
			at, free := gpu.Placement{Start: start, Size: p.Size}, true
			for _, i := range c.instances {
				free = free && !i.Placement.Overlaps(at)
			}
			if free {
				return c, at
			}
		}
	}
	return nil, gpu.Placement{}
}

// nos is the MIG partitioner of nebuly-ai/nos as it stands in its source: a plan for all pods that wait once a window
// closes, from a list of layouts, the first nodes first. It does not taint nodes. Ties follow the order of its list.
type nos struct {
	idle, most, poll time.Duration // the window closes when no pod came for idle, or after most
	waits            int
	opened, last     time.Duration
	open             bool
	next             time.Duration // poll
	vain             int           // events of the world when a plan changed nothing: until one more, the next would not either
}

// listed are the layouts that nos knows of an A100 40 GB. Two are parts of others, and 4g+3g and 3g+4×1g are missing.
func listed() []counts {
	return []counts{
		{0, 0, 0, 0, 1},
		{1, 1, 0, 1, 0},
		{3, 0, 0, 1, 0},
		{0, 0, 2, 0, 0},
		{1, 1, 1, 0, 0},
		{3, 0, 1, 0, 0},
		{0, 2, 1, 0, 0},
		{2, 1, 1, 0, 0},
		{1, 3, 0, 0, 0},
		{3, 2, 0, 0, 0},
		{5, 1, 0, 0, 0},
		{7, 0, 0, 0, 0},
	}
}

func (*nos) begin(*world) {}

func (n *nos) look(w *world) time.Duration {
	lengths := w.lengths()
	total := 0
	for _, l := range lengths {
		total += l
	}
	if total == 0 {
		n.open, n.waits = false, 0
		return 0
	}
	if !n.open {
		n.open, n.opened, n.last, n.next = true, w.now, w.now, w.now+n.poll
	}
	if total > n.waits {
		n.last = w.now
	}
	n.waits = total
	if w.now < n.next {
		return n.next
	}
	n.next = w.now + n.poll
	if w.now-n.last < n.idle && w.now-n.opened < n.most {
		return n.next
	}
	for _, m := range w.nodes {
		if m.busy {
			return n.next // its last plan is not reported
		}
	}
	n.opened, n.last = w.now, w.now
	if n.vain == w.happened {
		return 0
	}
	before := w.result.changes
	if n.plan(w, lengths); w.result.changes == before {
		n.vain = w.happened
	}
	return n.next
}

// plan gives each GPU in order the listed layout that provides most of what is lacking, and lets pods have it, smallest
// first. What pods of a node cannot use is not applied.
func (n *nos) plan(w *world, waiting counts) {
	lacking := waiting
	for _, c := range w.cards {
		_, idle := c.used()
		for p := range lacking {
			lacking[p] = max(0, lacking[p]-idle[p])
		}
	}
	for _, m := range w.nodes {
		if lacking == (counts{}) {
			return
		}
		required := lacking
		layouts := map[*card]counts{}
		var free counts
		for _, c := range m.cards {
			used, idle := c.used()
			if layout, provides := better(used, idle, required); provides {
				layouts[c] = layout
				for p := range idle {
					idle[p] = layout[p] - used[p]
					required[p] = max(0, required[p]-idle[p])
				}
			}
			free = free.plus(idle)
		}
		added := 0
		for p := range waiting {
			can := min(waiting[p], free[p])
			added += can
			waiting[p] -= can
			lacking[p] = min(lacking[p], waiting[p])
		}
		if added > 0 {
			n.apply(w, m, layouts)
		}
	}
}

// better is the listed layout that provides most of what is required beside what is in use.
func better(used, idle, required counts) (best counts, found bool) {
	most := 0
	for _, layout := range listed() {
		provided := 0
		for p := range required {
			if idle[p] < required[p] {
				provided += max(0, min(layout[p]-used[p], required[p]))
			}
		}
		if layout.covers(used) && provided > most {
			most, best, found = provided, layout, true
		}
	}
	return best, found
}

// apply deletes all idle instances of the GPUs whose layout changes and creates what their layouts have, in the order of
// placements in which all of it fits beside what is in use. If none does the GPU keeps what it has.
func (n *nos) apply(w *world, m *node, layouts map[*card]counts) {
	var cuts []cut
	for _, c := range m.cards {
		layout, changes := layouts[c]
		if !changes {
			continue
		}
		change := cut{card: c}
		var keep []gpu.Instance
		rest := layout
		for _, i := range c.instances {
			if i.pod == none {
				change.destroy = append(change.destroy, i)
			} else {
				keep = append(keep, i.Instance)
				rest[i.profile]--
			}
		}
		made, fit := arranged(keep, rest)
		if fit {
			change.create = made
			cuts = append(cuts, change)
		}
	}
	if len(cuts) > 0 {
		w.repartition(m, cuts, false)
	}
}

// arranged places instances beside others, largest first, by trying all places.
func arranged(beside []gpu.Instance, wanted counts) (made []gpu.Instance, fit bool) {
	for profile := kinds - 1; profile >= 0; profile-- {
		if wanted[profile] == 0 {
			continue
		}
		p, _ := theGPU().Profile(names()[profile])
		rest := wanted
		rest[profile]--
		for _, start := range p.Starts {
			at := gpu.Placement{Start: start, Size: p.Size}
			free := true
			for _, i := range beside {
				free = free && !i.Placement.Overlaps(at)
			}
			if !free {
				continue
			}
			next := gpu.Instance{Profile: p.Name, Placement: at}
			if others, fit := arranged(append(slices.Clip(beside), next), rest); fit {
				return append(others, next), true
			}
		}
		return nil, false
	}
	return nil, true
}

// TestOthersKeepToTheHardware: no player makes instances that a GPU cannot have, and all are within the limit.
func TestOthersKeepToTheHardware(t *testing.T) {
	for _, m := range mixes() {
		for _, c := range append(contenders(), more...) {
			made := generate(m, 400, 4, 0.9, 9)
			got := c.play(made, conditions{nodes: 2, gpusOfNode: 2, kubelet: 10 * time.Second, nvml: time.Second / 2})
			NewWithT(t).Expect(got.served).To(BeNumerically("<=", limit(made, 4)), c.name)
		}
	}
}

// TestNosMakesWhatIsLacking: a pod that waits gets its profile after the window, and its GPU only listed layouts.
func TestNosMakesWhatIsLacking(t *testing.T) {
	g := NewWithT(t)
	made := trace{span: time.Hour, pods: []pod{{arrival: time.Second, duration: time.Minute, profile: 4}}}
	c := conditions{nodes: 1, gpusOfNode: 1, kubelet: 10 * time.Second, nvml: time.Second / 2}
	got := play(made, c, &nos{idle: 10 * time.Second, most: time.Minute, poll: 5 * time.Second}, resting())
	g.Expect(got.waits).To(Equal([]time.Duration{19 * time.Second})) // 10 s, 2.5 s of driver, 1.5 s of plugin, the kubelet
	g.Expect(got.destroyed).To(Equal(4))
}
