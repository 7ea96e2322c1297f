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
// parts of ways; then the best so far counts, which is at least as good as each pod's best in turn.
const (
	maxExact  = 128
	maxVisits = 4000
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
	for _, p := range s.best {
		for n, g := range p.gpus {
			c.give(g, p.asks[n], false)
		}
	}
	return s.best
}

func same(a, b item) bool { return a.class == b.class && slices.Equal(a.asks, b.asks) }

type search struct {
	*chooser

	items  []item
	rest   [][]int // of each item on, the number of items by tier
	visits int
	picked []placed
	served []int // by tier

	best       []placed
	bestServed []int
	bestCost   cost
}

func newSearch(c *chooser, items []item, first []placed) *search {
	tiers := items[len(items)-1].tier + 1
	s := &search{chooser: c, items: items, rest: make([][]int, len(items)+1), served: make([]int, tiers), best: first, bestCost: c.cost}
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
	for _, n := range s.candidates(asked, node, from, s.nodesOf(i)) {
		s.give(n, asked, false)
		s.serve(at, append(slices.Clip(gpus), n), 0)
		s.give(n, asked, true)
	}
}

// candidates are the GPUs that can serve an instance, cheapest first, one of those that are the same.
func (s *search) candidates(asked, node, from int, nodes map[string]bool) []int {
	type like struct {
		bucket *bucket
		node   int
	}
	type candidate struct {
		place int
		cost  cost
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
		if of, can := s.gain(n, asked); can {
			seen[k] = true
			list = append(list, candidate{n, of})
		}
	}
	slices.SortStableFunc(list, func(a, b candidate) int { return cmp.Or(a.cost.compare(b.cost), cmp.Compare(a.place, b.place)) })
	found := make([]int, 0, len(list))
	for _, of := range list {
		found = append(found, of.place)
	}
	return found
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
	s.best, s.bestServed, s.bestCost = slices.Clone(s.picked), slices.Clone(s.served), s.cost
}
