// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// The search compares all ways to serve the pods of a pool with at most maxExact GPUs, until it has looked at maxVisits
// parts of ways, or has given maxSteps instances; then the best so far counts, which is at least as good as each pod's best
// in turn. A pod with many instances has more ways than parts, and none of them may have room for its last instance.
const (
	maxExact  = 128
	maxVisits = 4000
	maxSteps  = 16 * maxVisits
)

// choose decides which pods are served, and where, and leaves the GPUs so.
func (c *chooser) choose(items []item) []placed {
	var chosen []placed
	for n, i := range items {
		if n > 0 && same(items[n-1], i) && (len(chosen) == 0 || chosen[len(chosen)-1].at != n-1) {
			continue // the one before it found no room
		}
		if gpus := c.put(i); gpus != nil {
			chosen = append(chosen, placed{item: i, at: n, gpus: gpus})
		}
	}
	if len(c.places) > maxExact || len(items) == 0 {
		return chosen
	}
	s := newSearch(c, items, chosen)
	for _, p := range slices.Backward(chosen) {
		c.take(p.item, p.gpus)
	}
	s.next(0, 0)
	c.replay(s.best, s.bestGone)
	return s.best
}

// gone are the instances of reserved profiles that the GPUs of pods are to lose; nil if there is no reserve.
func (c *chooser) gone(chosen []placed) map[int]tally {
	if len(c.spare) == 0 {
		return nil
	}
	gone := map[int]tally{}
	for _, p := range chosen {
		for _, n := range p.gpus {
			gone[n] = c.places[n].option.gone
		}
	}
	return gone
}

// replay serves pods as they were served before, where the GPUs lost no more than then.
func (c *chooser) replay(chosen []placed, gone map[int]tally) {
	for n, limit := range gone {
		c.places[n].limit = &limit
	}
	for _, p := range chosen {
		for n, g := range p.gpus {
			c.give(g, p.asks[n], false)
		}
	}
	for n := range gone {
		c.places[n].limit = nil
		c.file(n)
	}
}

func same(a, b item) bool { return a.class == b.class && slices.Equal(a.asks, b.asks) }

type search struct {
	*chooser

	items  []item
	rest   [][]int // of each item on, the number of items by tier
	visits int
	steps  int
	picked []placed
	served []int // by tier

	best       []placed
	bestServed []int
	bestCost   cost
	bestGone   map[int]tally
}

func newSearch(c *chooser, items []item, first []placed) *search {
	tiers := items[len(items)-1].tier + 1
	s := &search{
		chooser: c, items: items, rest: make([][]int, len(items)+1), served: make([]int, tiers), best: first, bestCost: c.cost, bestGone: c.gone(first),
	}
	s.rest[len(items)] = make([]int, tiers)
	for n := len(items) - 1; n >= 0; n-- {
		s.rest[n] = slices.Clone(s.rest[n+1])
		s.rest[n][items[n].tier]++
	}
	s.bestServed = make([]int, tiers)
	for _, p := range first {
		s.bestServed[p.tier]++
	}
	c.sortNodes()
	return s
}

// sortNodes finds nodes that are the same to all classes: only one of those that serve nothing yet needs to be tried.
func (c *chooser) sortNodes() {
	kinds, tables := map[string]int{}, map[*table]int{}
	for _, node := range c.nodes {
		var key strings.Builder
		var of []int
		for _, n := range node.places {
			t := c.places[n].table
			if _, known := tables[t]; !known {
				tables[t] = len(tables)
			}
			of = append(of, tables[t])
		}
		slices.Sort(of)
		_, _ = fmt.Fprint(&key, of)
		for _, class := range c.classes {
			_, _ = fmt.Fprint(&key, admits(class.Nodes, node.name))
		}
		if _, known := kinds[key.String()]; !known {
			kinds[key.String()] = len(kinds)
		}
		node.kind = kinds[key.String()]
	}
}

// next serves the items from one on, on GPUs from one on if the item before is the same, or leaves them out.
func (s *search) next(at, from int) {
	if s.visits++; s.visits > maxVisits || !s.promises(at) {
		return
	}
	if at == len(s.items) {
		s.offer()
		return
	}
	i := s.items[at]
	s.served[i.tier]++
	s.serve(at, nil, from)
	s.served[i.tier]--
	skip := at + 1
	for skip < len(s.items) && same(s.items[skip], i) {
		skip++
	}
	s.next(skip, 0)
}

// serve tries the GPUs for the next instance of an item, after those that it was given.
func (s *search) serve(at int, gpus []int, from int) {
	i := s.items[at]
	if len(gpus) == len(i.asks) {
		s.picked = append(s.picked, placed{item: i, at: at, gpus: gpus})
		next := 0
		if at+1 < len(s.items) && len(i.asks) == 1 && same(s.items[at+1], i) {
			next = gpus[0]
		}
		s.next(at+1, next)
		s.picked = s.picked[:len(s.picked)-1]
		return
	}
	asked := i.asks[len(gpus)]
	node := none
	if len(gpus) > 0 {
		node = s.places[gpus[0]].node
		if asked == i.asks[len(gpus)-1] {
			from = gpus[len(gpus)-1]
		} else {
			from = 0
		}
	}
	for _, of := range s.candidates(asked, node, from, s.nodesOf(i)) {
		if s.steps++; s.steps > maxSteps || s.visits > maxVisits {
			s.visits = maxVisits + 1
			return
		}
		p := s.places[of.place]
		was := p.limit
		p.limit = of.limit
		s.give(of.place, asked, false)
		s.serve(at, append(slices.Clip(gpus), of.place), 0)
		p.limit = was
		s.give(of.place, asked, true)
	}
}

// candidate is a GPU that can serve an instance, and what it loses of reserved profiles for it.
type candidate struct {
	place int
	limit *tally // nil: it has nothing of them that may go
	cost  cost
}

// candidates are the GPUs that can serve an instance, cheapest first, one of those that are the same.
func (s *search) candidates(asked, node, from int, nodes map[string]bool) []candidate {
	type like struct {
		bucket *bucket
		node   int
	}
	var list []candidate
	seen := map[like]bool{}
	for n := from; n < len(s.places); n++ {
		p := s.places[n]
		on := s.nodes[p.node]
		k := like{p.bucket, -1 - p.node}
		if on.given == 0 {
			k.node = on.kind
		}
		if node != none && p.node != node || !admits(nodes, on.name) || seen[k] {
			continue
		}
		if p.table.reserved != (tally{}) {
			seen[k] = true
			list = append(list, s.ways(n, asked)...)
		} else if of, can := s.gain(n, asked); can {
			seen[k] = true
			list = append(list, candidate{place: n, cost: of})
		}
	}
	slices.SortStableFunc(list, func(a, b candidate) int { return cmp.Or(a.cost.compare(b.cost), cmp.Compare(a.place, b.place)) })
	return list
}

// ways are the options by which a GPU can serve an instance more: the least costly one, and those that lose less of
// reserved profiles, which another GPU may have to lose.
func (s *search) ways(n, asked int) (list []candidate) {
	p := s.places[n]
	needs, at := p.needs, p.table.number(s.asked[asked])
	if at < 0 {
		return nil
	}
	needs[at]++
	was := p.limit
	p.limit = nil
	limits := []tally{s.limitOf(p)}
	p.limit = was
	for len(limits) > 0 {
		limit := limits[0]
		limits = limits[1:]
		o := p.table.with(needs, limit)
		if o == nil || slices.ContainsFunc(list, func(c candidate) bool { return *c.limit == o.gone }) {
			continue
		}
		of := o.cost.minus(p.option.cost)
		if of.tainted > 0 && s.nodes[p.node].tainted > 0 {
			of.tainted = 0
		}
		if of.tainted <= 0 || s.mayTaint() {
			list = append(list, candidate{place: n, limit: &o.gone, cost: of})
		}
		for less, lost := range o.gone {
			if lost > 0 && s.spare[p.table.names[less]] < unlimited/2 {
				limit[less] = lost - 1
				limits = append(limits, limit)
				limit[less] = lost
			}
		}
	}
	return list
}

// promises reports whether what is picked can become better than the best if all items from one on are served at no
// further cost.
func (s *search) promises(at int) bool {
	for tier, n := range s.served {
		if d := n + s.rest[at][tier] - s.bestServed[tier]; d != 0 {
			return d > 0
		}
	}
	return s.cost.compareBounded(s.bestCost) <= 0
}

// offer takes what is picked if it is better than the best.
func (s *search) offer() {
	if d := slices.Compare(s.served, s.bestServed); d < 0 || d == 0 && s.cost.compare(s.bestCost) >= 0 {
		return
	}
	s.best, s.bestServed, s.bestCost, s.bestGone = slices.Clone(s.picked), slices.Clone(s.served), s.cost, s.gone(s.picked)
}
