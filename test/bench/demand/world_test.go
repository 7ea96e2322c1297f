// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// conditions are those of a pool.
type conditions struct {
	nodes, gpusOfNode int
	kubelet           time.Duration // how often it publishes what the device plugin has
	nvml              time.Duration // what creating or destroying one instance takes
	packed            bool          // pods are packed onto nodes and GPUs; otherwise they are spread
}

func (c conditions) gpus() int { return c.nodes * c.gpusOfNode }

func (c conditions) placement() string {
	if c.packed {
		return "packed"
	}
	return "spread"
}

// What else a change takes: before a disruptive one the operator taints the node and waits until the kubelet shows every
// bound pod; afterwards NVIDIA's device plugin starts again. Both are what a node with a simulated driver takes.
const (
	taintWait     = 1500 * time.Millisecond
	pluginRestart = 1500 * time.Millisecond
)

// instance is a MIG instance of a GPU.
type instance struct {
	gpu.Instance

	card    *card
	profile int
	pod     int           // that has it; none
	since   time.Duration // it is idle
	from    time.Duration // the kubelet offers it
}

const none = -1

type card struct {
	node      *node
	index     int // in the pool
	instances []*instance
	changed   time.Duration // last disruptive change; negative: never
}

type node struct {
	index   int
	cards   []*card
	running int
	busy    bool // a change is under way
	tainted bool
}

// event is what happens at a time.
type event struct {
	at  time.Duration
	seq int
	do  func()
}

type events []event

func (h events) Len() int { return len(h) }
func (h events) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].seq < h[j].seq
}
func (h events) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *events) Push(x any)   { *h = append(*h, x.(event)) }
func (h *events) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// player decides which instances the GPUs of a pool have.
type player interface {
	// begin is called once, with GPUs that have the resting layout.
	begin(w *world)
	// look is called at each event, once pods that find an instance have started. It returns when to look again at the
	// latest; 0: at the next event.
	look(w *world) time.Duration
}

// binder is a player that gives pods their instances itself.
type binder interface{ bind(w *world) }

// world is a pool with one scheduler. Pods that find no instance do not hold back others; those of one profile start in
// the order of their arrival.
type world struct {
	conditions
	trace   trace
	player  player
	now     time.Duration
	nodes   []*node
	cards   []*card
	waiting [kinds][]int // pods, by arrival
	events  events
	seq     int
	lookAt  time.Duration
	// happened counts the events but those at which a player only wanted to look.
	happened int
	ended    func(i *instance)
	result   result
}

// resting is NVIDIA's all-balanced layout.
func resting() counts { return counts{2, 1, 1, 0, 0} }

// play lets a player serve a trace.
func play(t trace, c conditions, p player, layout counts) result {
	w := &world{conditions: c, trace: t, player: p, result: result{pods: len(t.pods), span: t.span}}
	for n := range c.nodes {
		made := &node{index: n}
		for range c.gpusOfNode {
			at := &card{node: made, index: len(w.cards), changed: -time.Hour}
			for _, i := range placed(layout) {
				w.create(at, i, 0)
			}
			made.cards = append(made.cards, at)
			w.cards = append(w.cards, at)
		}
		w.nodes = append(w.nodes, made)
	}
	for i, p := range t.pods {
		w.at(p.arrival, func() { w.waiting[p.profile] = append(w.waiting[p.profile], i) })
	}
	p.begin(w)
	w.run()
	return w.result
}

func (w *world) run() {
	for len(w.events) > 0 && w.events[0].at < w.trace.span {
		w.now = w.events[0].at
		for len(w.events) > 0 && w.events[0].at == w.now {
			w.happened++
			heap.Pop(&w.events).(event).do()
		}
		if b, is := w.player.(binder); is {
			b.bind(w)
		} else {
			w.bind()
		}
		if next := w.player.look(w); next > w.now && (w.lookAt <= w.now || next < w.lookAt) {
			w.lookAt = next
			w.at(next, func() { w.happened-- })
		}
	}
}

func (w *world) at(t time.Duration, do func()) {
	w.seq++
	heap.Push(&w.events, event{at: t, seq: w.seq, do: do})
}

// bind gives waiting pods the idle instances that are offered.
func (w *world) bind() {
	for profile := range w.waiting {
		for len(w.waiting[profile]) > 0 {
			i := w.offered(profile)
			if i == nil {
				break
			}
			w.start(w.waiting[profile][0], i, w.now)
			w.waiting[profile] = w.waiting[profile][1:]
		}
	}
}

// start lets a pod run on an instance from a time on.
func (w *world) start(index int, i *instance, from time.Duration) {
	p := w.trace.pods[index]
	i.pod = index
	i.card.node.running++
	w.result.start(p, from, w.trace.span)
	w.at(from+p.duration, func() {
		i.pod, i.since = none, w.now
		i.card.node.running--
		if w.ended != nil {
			w.ended(i)
		}
	})
}

// offered is the idle instance of a profile that kube-scheduler and device plugin choose; nil if there is none. Spread:
// the node with the fewest pods (LeastAllocated), there the GPU with the fewest instances in use (distributed). Packed:
// the ones with the most (MostAllocated, packed).
func (w *world) offered(profile int) (best *instance) {
	least := 0
	for _, c := range w.cards {
		if c.node.tainted {
			continue
		}
		used := 0
		var free *instance
		for _, i := range c.instances {
			switch {
			case i.pod != none:
				used++
			case free == nil && i.profile == profile && i.from <= w.now:
				free = i
			}
		}
		score := c.node.running*100 + used
		if w.packed {
			score = -score
		}
		if free != nil && (best == nil || score < least) {
			best, least = free, score
		}
	}
	return best
}

// create adds an instance to a GPU that the kubelet offers from a time on.
func (w *world) create(c *card, i gpu.Instance, from time.Duration) *instance {
	w.seq++
	i.ID = w.seq
	made := &instance{Instance: i, card: c, profile: kindOf(i.Profile), pod: none, since: from, from: from}
	c.instances = append(c.instances, made)
	return made
}

func (c *card) remove(i *instance) {
	c.instances = slices.DeleteFunc(c.instances, func(o *instance) bool { return o == i })
}

// cut is a change of one GPU.
type cut struct {
	card    *card
	destroy []*instance
	create  []gpu.Instance
}

// repartition changes GPUs of a node, each beside the others. With a taint the node takes no GPU pod from now on until
// the kubelet offers what was made.
func (w *world) repartition(n *node, cuts []cut, taint bool) {
	lane := time.Duration(0)
	for _, c := range cuts {
		lane = max(lane, time.Duration(len(c.destroy)+len(c.create))*w.nvml)
		w.result.changes++
		w.result.destroyed += len(c.destroy)
		if len(c.destroy) > 0 {
			c.card.changed = w.now
		}
	}
	ready := w.now + lane + pluginRestart
	if taint {
		ready += taintWait
	}
	offered := w.published(n, ready)
	for _, c := range cuts {
		for _, i := range c.destroy {
			c.card.remove(i)
		}
		for _, i := range c.create {
			w.create(c.card, i, offered)
		}
		c.card.check()
	}
	n.busy, n.tainted = true, taint
	begun := w.now
	w.at(offered, func() {
		if n.tainted {
			w.result.tainted += w.now - begun
		}
		n.busy, n.tainted = false, false
	})
}

// published is when the kubelet of a node next publishes. Those of the nodes do not publish at the same time.
func (w *world) published(n *node, t time.Duration) time.Duration {
	phase := w.kubelet * time.Duration(n.index) / time.Duration(w.conditions.nodes)
	return (t - phase + w.kubelet - 1).Truncate(w.kubelet) + phase
}

// check fails on instances that a GPU cannot have.
func (c *card) check() {
	var has counts
	for n, i := range c.instances {
		has[i.profile]++
		for _, o := range c.instances[:n] {
			if i.Placement.Overlaps(o.Placement) {
				panic(fmt.Sprintf("GPU %d: %v overlaps %v", c.index, i.Instance, o.Instance))
			}
		}
		if p, _ := theGPU().Profile(i.Profile); !slices.Contains(p.Starts, i.Placement.Start) || p.Size != i.Placement.Size {
			panic(fmt.Sprintf("GPU %d: %v has no place there", c.index, i.Instance))
		}
	}
	if !fits(has, 1) {
		panic(fmt.Sprintf("GPU %d cannot have %v", c.index, has))
	}
}

// used are the instances of a GPU that pods have, idle those that none has.
func (c *card) used() (used, idle counts) {
	for _, i := range c.instances {
		if i.pod != none {
			used[i.profile]++
		} else {
			idle[i.profile]++
		}
	}
	return used, idle
}

func (w *world) lengths() (c counts) {
	for p := range w.waiting {
		c[p] = len(w.waiting[p])
	}
	return c
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

// still never changes anything.
type still struct{}

func (still) begin(*world)              {}
func (still) look(*world) time.Duration { return 0 }

// TestAStaticLayoutServesTheSameInTheWorld: the world's events serve what the queues of static layouts do.
func TestAStaticLayoutServesTheSameInTheWorld(t *testing.T) {
	g := NewWithT(t)
	for _, packed := range []bool{true, false} {
		for _, layout := range full() {
			made := generate(mixes()[1], 500, 4, 0.9, 3)
			c := conditions{nodes: 2, gpusOfNode: 2, kubelet: 10 * time.Second, packed: packed}
			lived, queued := play(made, c, still{}, layout), static(made, everywhere(layout, 4))
			g.Expect(lived.served).To(Equal(queued.served))
			slices.Sort(lived.waits)
			slices.Sort(queued.waits)
			g.Expect(lived.waits).To(Equal(queued.waits))
		}
	}
}

func TestAKubeletPublishesAtItsTimes(t *testing.T) {
	g := NewWithT(t)
	w := &world{conditions: conditions{nodes: 2, kubelet: 10 * time.Second}}
	for n, want := range map[int][2]time.Duration{0: {10 * time.Second, 20 * time.Second}, 1: {5 * time.Second, 15 * time.Second}} {
		g.Expect(w.published(&node{index: n}, 3*time.Second)).To(Equal(want[0]))
		g.Expect(w.published(&node{index: n}, want[0])).To(Equal(want[0]))
		g.Expect(w.published(&node{index: n}, want[0]+1)).To(Equal(want[1]))
	}
}
