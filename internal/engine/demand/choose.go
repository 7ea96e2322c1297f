// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// place is a GPU, with what was chosen for it.
type place struct {
	gpu       *GPU
	node      int
	instances []Instance // by placement
	states    []state
	table     *table
	needs     tally   // of pods that were given instances of it
	option    *option // the least costly one that offers them
	limit     *tally  // that the search sets to what may go of the reserved profiles; nil: what the reserve allows
	bucket    *bucket
}

// at is the instance that begins at a memory slice.
func (p *place) at(start int) Instance {
	n, _ := slices.BinarySearchFunc(p.instances, start, func(i Instance, at int) int { return cmp.Compare(i.Placement.Start, at) })
	return p.instances[n]
}

// bucket is GPUs that are as good as each other for a pod that all their nodes would take.
type bucket struct {
	table   *table
	needs   tally
	limit   tally
	tainted bool  // the node, by another GPU or this one
	places  []int // ascending
	gains   []gain
}

// gain is what it costs to serve an instance more.
type gain struct {
	option *option // nil: it cannot
	cost   cost
}

type bucketKey struct {
	table        *table
	needs, limit tally
	tainted      bool
}

type nodeState struct {
	name    string
	places  []int
	tainted int // GPUs with instances that are to be destroyed
	given   int // instances that serve pods
	kind    int // nodes of one kind are the same to all classes; see search
}

// relaxed is what is left out of account, to find out why pods wait.
type relaxed struct{ budget, held, reserve, frozen bool }

type chooser struct {
	memory   *Memory
	now      time.Time
	pool     Pool
	classes  []Class
	relaxed  relaxed
	models   []*gpu.Device
	asked    []string // profiles, exact
	capacity int      // instances that the pool can have at most
	places   []*place // by node and UUID
	nodes    []*nodeState
	byKey    map[bucketKey]*bucket
	order    [][]*bucket // of each profile of asked: those that can serve it, the cheapest first
	tainted  int         // nodes
	cost     cost
	spare    map[string]int // idle instances of each reserved profile, exact, that may still be destroyed
	reserved []int          // places that have such instances which may be destroyed
	most     int            // such instances that one GPU has
}

func newChooser(m *Memory, now time.Time, pool Pool, classes []Class, r relaxed) *chooser {
	c := &chooser{memory: m, now: now, pool: pool, classes: classes, relaxed: r, byKey: map[bucketKey]*bucket{}}
	order := make([]*GPU, 0, len(pool.GPUs))
	for n := range pool.GPUs {
		order = append(order, &pool.GPUs[n])
	}
	byName := func(a, b *GPU) int { return cmp.Or(strings.Compare(a.Node, b.Node), strings.Compare(a.UUID, b.UUID)) }
	if !slices.IsSortedFunc(order, byName) {
		slices.SortFunc(order, byName)
	}
	for n, g := range order {
		if (n == 0 || order[n-1].Model != g.Model) && !slices.Contains(c.models, g.Model) {
			c.models = append(c.models, g.Model)
		}
	}
	c.ask()
	c.reserve(order)
	model, number := (*gpu.Device)(nil), uint16(0)
	for _, g := range order {
		if g.Model != model {
			model, number = g.Model, m.number(c.kindOf(g.Model))
		}
		c.add(g, number)
	}
	for n := range c.places {
		c.file(n)
	}
	return c
}

// allowed are the exact profiles of a GPU that a policy's names mean.
func allowed(d *gpu.Device, profiles []string) (names []string) {
	for _, name := range profiles {
		if p, err := mig.Resolve(*d, name); err == nil && !slices.Contains(names, p.Name) && len(names) < maxProfiles {
			names = append(names, p.Name)
		}
	}
	slices.Sort(names)
	return names
}

// ask numbers the profiles that pods ask for or that may be made.
func (c *chooser) ask() {
	all := map[string]bool{}
	for _, d := range c.models {
		for _, name := range allowed(d, c.pool.Profiles) {
			all[name] = true
		}
	}
	for _, class := range c.classes {
		for name := range class.Asks {
			all[name] = true
		}
	}
	c.asked = slices.Sorted(maps.Keys(all))
	c.order = make([][]*bucket, len(c.asked))
}

// numbers are the profiles of asks, largest first, one for each instance.
func (c *chooser) numbers(asks map[string]int) (list []int) {
	one := func(name string) int { return c.sizeOf(map[string]int{name: 1}) }
	larger := func(a, b string) int { return cmp.Or(cmp.Compare(one(b), one(a)), cmp.Compare(a, b)) }
	for _, name := range slices.SortedFunc(maps.Keys(asks), larger) {
		at, _ := slices.BinarySearch(c.asked, name)
		list = append(list, slices.Repeat([]int{at}, max(0, asks[name]))...)
	}
	return list
}

func (c *chooser) sizeOf(asks map[string]int) (sum int) {
	for name, n := range asks {
		size := 0
		for _, d := range c.models {
			if p, has := d.Profile(name); has {
				size = max(size, p.Size)
			}
		}
		sum += n * size
	}
	return sum
}

// exactly are the exact profiles of GPUs of the pool that a name of the policy means.
func (c *chooser) exactly(name string) (list []int) {
	for _, d := range c.models {
		if found, err := mig.Resolve(*d, name); err == nil {
			if at, known := slices.BinarySearch(c.asked, found.Name); known && !slices.Contains(list, at) {
				list = append(list, at)
			}
		}
	}
	return list
}

// unlimited is more than a pool can have.
const unlimited = 1 << 30

// reserve counts the instances of reserved profiles that may be destroyed: those that are idle beyond the reserve.
func (c *chooser) reserve(gpus []*GPU) {
	c.spare = map[string]int{}
	for _, d := range c.models {
		for name, count := range c.pool.Reserve {
			if p, err := mig.Resolve(*d, name); err == nil && count > 0 {
				c.spare[p.Name] = -count
			}
		}
	}
	if len(c.spare) == 0 {
		return
	}
	for _, g := range gpus {
		for _, i := range g.Instances {
			if _, is := c.spare[i.Profile]; is && i.Holder == "" {
				c.spare[i.Profile]++
			}
		}
	}
	for name, n := range c.spare {
		if c.spare[name] = max(0, n); c.relaxed.reserve {
			c.spare[name] = unlimited
		}
	}
}

func (c *chooser) kindOf(d *gpu.Device) kind {
	of := kind{model: d, names: allowed(d, c.pool.Profiles)}
	for _, name := range of.names {
		if _, is := c.spare[name]; is {
			of.reserved = append(of.reserved, name)
		}
	}
	return of
}

// add takes in a GPU, whose table it shares with those that have the same.
func (c *chooser) add(g *GPU, number uint16) {
	p := &place{gpu: g, instances: byPlacement(g.Instances), states: make([]state, len(g.Instances))}
	key := make([]byte, 0, 128)
	frozen := g.Frozen && !c.relaxed.frozen
	for n, i := range p.instances {
		s := c.state(g, i)
		p.states[n] = s
		key = append(key, byte(i.Placement.Start), byte(s))
		if of, found := g.Model.Profile(i.Profile); s == stays && found && !strings.ContainsAny(i.Profile, "+-") {
			key = append(key, byte(of.Size), byte(of.Slices)) // whatever its memory
		} else {
			key = append(key, i.Profile...)
		}
	}
	if frozen {
		key = append(key, '!')
	}
	key = binary.BigEndian.AppendUint16(key, number)
	found := c.memory.tables[string(key)]
	if found == nil {
		found = newTable(c.memory.kinds[number], p.instances, p.states, frozen)
		c.memory.tables[string(key)] = found
	}
	p.table, p.option = found, found.with(tally{}, tally{})
	if found.reserved != (tally{}) {
		c.reserved = append(c.reserved, len(c.places))
		c.most = max(c.most, int(slices.Max(found.reserved[:])))
	}
	if n := len(c.nodes); n == 0 || c.nodes[n-1].name != g.Node {
		c.nodes = append(c.nodes, &nodeState{name: g.Node})
	}
	p.node = len(c.nodes) - 1
	c.nodes[p.node].places = append(c.nodes[p.node].places, len(c.places))
	c.capacity += g.Model.ComputeSlices()
	c.places = append(c.places, p)
}

func byPlacement(instances []Instance) []Instance {
	lower := func(a, b Instance) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) }
	if slices.IsSortedFunc(instances, lower) {
		return instances
	}
	return slices.SortedFunc(slices.Values(instances), lower)
}

func (c *chooser) state(g *GPU, i Instance) state {
	switch {
	case i.Holder != "":
		return stays
	case i.Partial:
		return idle
	case !c.relaxed.held && (i.IdleSince.IsZero() || goes(c.pool, g, i).After(c.now)):
		return idle
	}
	return mayGo
}

// goes is when an idle instance may be destroyed.
func goes(pool Pool, g *GPU, i Instance) time.Time {
	at := i.IdleSince.Add(pool.Idle)
	if held := g.Changed.Add(Hold); !g.Changed.IsZero() && held.After(at) {
		return held
	}
	return at
}

// file puts a GPU into its bucket.
func (c *chooser) file(n int) {
	p := c.places[n]
	key := bucketKey{p.table, p.needs, c.limitOf(p), c.nodes[p.node].tainted > 0}
	if b := p.bucket; b != nil {
		if (bucketKey{b.table, b.needs, b.limit, b.tainted}) == key {
			return
		}
		at, _ := slices.BinarySearch(b.places, n)
		b.places = slices.Delete(b.places, at, at+1)
	}
	b := c.byKey[key]
	if b == nil {
		b = c.newBucket(key)
	}
	if at, there := slices.BinarySearch(b.places, n); !there {
		b.places = slices.Insert(b.places, at, n)
	}
	p.bucket = b
}

func (c *chooser) newBucket(key bucketKey) *bucket {
	b := &bucket{table: key.table, needs: key.needs, limit: key.limit, tainted: key.tainted, gains: make([]gain, len(c.asked))}
	c.byKey[key] = b
	now := b.table.with(b.needs, b.limit)
	for asked, name := range c.asked {
		g := &b.gains[asked]
		at := b.table.number(name)
		if at < 0 {
			continue
		}
		needs := b.needs
		needs[at]++
		if g.option = b.table.with(needs, b.limit); g.option == nil {
			continue
		}
		if g.cost = g.option.cost.minus(now.cost); b.tainted {
			g.cost.tainted = 0
		}
		order := c.order[asked]
		before, _ := slices.BinarySearchFunc(order, g.cost, func(o *bucket, of cost) int { return o.gains[asked].cost.compare(of) })
		c.order[asked] = slices.Insert(order, before, b)
	}
	return b
}

// gain is what it costs that a GPU serves one instance more; false if it cannot.
func (c *chooser) gain(n, asked int) (cost, bool) {
	g := c.places[n].bucket.gains[asked]
	return g.cost, g.option != nil && (g.cost.tainted == 0 || c.mayTaint())
}

func (c *chooser) mayTaint() bool {
	return c.pool.Budget < 0 || c.relaxed.budget || c.tainted < c.pool.Budget
}

// give lets a GPU serve one instance more, or with less one fewer.
func (c *chooser) give(n, asked int, less bool) {
	p := c.places[n]
	at := p.table.number(c.asked[asked])
	before, node := p.option, c.nodes[p.node]
	if less {
		p.needs[at]--
		node.given--
	} else {
		p.needs[at]++
		node.given++
	}
	p.option = p.table.with(p.needs, c.limitOf(p))
	c.spend(p, before)
	was := node.tainted > 0
	node.tainted += p.option.cost.tainted - before.cost.tainted
	change := p.option.cost.minus(before.cost)
	change.tainted = 0
	if is := node.tainted > 0; is != was {
		change.tainted = 1
		if was {
			change.tainted = -1
		}
		c.tainted += change.tainted
		for _, other := range node.places {
			c.file(other)
		}
	}
	c.cost = c.cost.plus(change)
	c.file(n)
}

// limitOf is how many instances of reserved profiles a GPU may lose, those included that it is to lose already.
func (c *chooser) limitOf(p *place) tally {
	limit := p.table.reserved
	if limit == (tally{}) {
		return limit
	}
	for at, name := range p.table.names {
		if limit[at] > 0 {
			limit[at] = uint8(min(int(limit[at]), c.spare[name]+int(p.option.gone[at])))
		}
		if p.limit != nil {
			limit[at] = min(limit[at], p.limit[at])
		}
	}
	return limit
}

// spend accounts for the instances of reserved profiles that a GPU is to lose now, and was before.
func (c *chooser) spend(p *place, before *option) {
	matters := false
	for at, now := range p.option.gone {
		if d := int(now) - int(before.gone[at]); d != 0 {
			name := p.table.names[at]
			was := c.spare[name]
			c.spare[name] = was - d
			matters = matters || min(was, was-d) < c.most
		}
	}
	if matters {
		for _, n := range c.reserved {
			c.file(n)
		}
	}
}

// placed is a pod with the GPUs of its instances.
type placed struct {
	item

	at   int // in the list of items
	gpus []int
}

// admits reports whether a node would take the pods of a class.
func admits(nodes map[string]bool, name string) bool { return nodes == nil || nodes[name] }

// cheapest is the GPU where an instance costs least: of one node, or of those that are admitted.
func (c *chooser) cheapest(asked, node int, nodes map[string]bool) int {
	best, least := none, cost{}
	offer := func(n int, of cost) {
		if d := of.compare(least); best == none || d < 0 || d == 0 && n < best {
			best, least = n, of
		}
	}
	if node != none {
		for _, n := range c.nodes[node].places {
			if of, can := c.gain(n, asked); can {
				offer(n, of)
			}
		}
		return best
	}
	for _, b := range c.order[asked] {
		of := b.gains[asked].cost
		if best != none && of.compare(least) > 0 {
			break
		}
		if len(b.places) == 0 || of.tainted > 0 && !c.mayTaint() {
			continue
		}
		if at := slices.IndexFunc(b.places, func(n int) bool { return admits(nodes, c.nodes[c.places[n].node].name) }); at >= 0 {
			offer(b.places[at], of)
		}
	}
	return best
}

// nodesOf are the nodes that would take a pod; nil: all.
func (c *chooser) nodesOf(i item) map[string]bool {
	if i.class == none {
		return nil
	}
	return c.classes[i.class].Nodes
}

// maxNodes bounds on how many nodes a pod with several instances is tried that find room for it.
const maxNodes = 32

// put serves a pod where it costs least and returns the GPUs of its instances; nil if nowhere.
func (c *chooser) put(i item) []int {
	nodes := c.nodesOf(i)
	if len(i.asks) == 1 {
		n := c.cheapest(i.asks[0], none, nodes)
		if n == none {
			return nil
		}
		c.give(n, i.asks[0], false)
		return []int{n}
	}
	best, least, found := none, cost{}, 0
	for n := 0; n < len(c.nodes) && found < maxNodes; n++ {
		if !admits(nodes, c.nodes[n].name) {
			continue
		}
		before := c.cost
		if gpus := c.putOn(i, n); gpus != nil {
			found++
			if of := c.cost.minus(before); best == none || of.compare(least) < 0 {
				best, least = n, of
			}
			c.take(i, gpus)
		}
	}
	if best == none {
		return nil
	}
	return c.putOn(i, best)
}

// putOn serves a pod on one node, instance by instance.
func (c *chooser) putOn(i item, node int) (gpus []int) {
	for _, asked := range i.asks {
		n := c.cheapest(asked, node, nil)
		if n == none {
			c.take(i, gpus)
			return nil
		}
		c.give(n, asked, false)
		gpus = append(gpus, n)
	}
	return gpus
}

// take takes the instances back.
func (c *chooser) take(i item, gpus []int) {
	for n, g := range slices.Backward(gpus) {
		c.give(g, i.asks[n], true)
	}
}

// possible reports whether a pod can be served as things are, and leaves them so.
func (c *chooser) possible(i item) bool {
	if len(i.asks) == 1 {
		return c.cheapest(i.asks[0], none, c.nodesOf(i)) != none
	}
	gpus := c.put(i)
	c.take(i, gpus)
	return gpus != nil
}
