// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// often is the part of the reported samples that the usual utilization of a container does not exceed.
const often = 0.95

// FromAgents is what the agents of nodes have kept. Only containers of the namespace count as held at the same time;
// empty: all.
func FromAgents(histories []usage.History, namespace string) Seen {
	s := Seen{Source: "the memory of the agents", Time: map[string]time.Duration{}, Concurrent: map[string]int{}}
	for _, h := range histories {
		s.Time[h.Node] = h.Time()
		held := map[usage.Name][]span{}
		found := map[usage.Name]*Container{}
		var all []span
		var order []usage.Name
		for _, o := range h.Containers {
			c := found[o.Name]
			if c == nil {
				c = &Container{Name: o.Name, Node: h.Node, MemoryBytes: new(int64(0))}
				found[o.Name], order = c, append(order, o.Name)
			}
			c.observed(o)
			held[o.Name] = append(held[o.Name], span{o.First, o.Last})
			if namespace == "" || o.Namespace == namespace {
				all = append(all, span{o.First, o.Last})
			}
		}
		for _, n := range order {
			found[n].Held = overlap(held[n])
			s.Containers = append(s.Containers, *found[n])
		}
		s.Concurrent[h.Node] = overlap(all)
		if h.Dropped > 0 {
			s.Lacks = append(s.Lacks, fmt.Sprintf("%s on node %s that ended first, since the agent keeps %d", counted(h.Dropped, "container"), h.Node, usage.MaxObserved))
		}
		if h.Incomplete > 0 {
			s.Lacks = append(s.Lacks, fmt.Sprintf("%s of node %s in which not all GPUs could be measured", counted(h.Incomplete, "sample"), h.Node))
		}
	}
	return s
}

func (c *Container) observed(o usage.Observed) {
	switch {
	case o.Memory == nil:
		c.MemoryBytes = nil
	case c.MemoryBytes != nil:
		c.MemoryBytes = new(max(*c.MemoryBytes, int64(o.Memory.Peak)))
	}
	if o.Compute != nil {
		c.Compute = larger(c.Compute, o.Compute.Peak)
		c.Compute95 = larger(c.Compute95, o.Compute.Quantile(often, usage.ComputeBounds()))
	}
}

func larger(known *float64, value float64) *float64 {
	if known != nil {
		value = max(value, *known)
	}
	return &value
}

// span is a time with its ends.
type span struct{ first, last time.Time }

// overlap is how many spans there are at the same time at most.
func overlap(spans []span) int {
	type edge struct {
		at    time.Time
		count int
	}
	edges := make([]edge, 0, 2*len(spans)) //nolint:mnd // each has two ends
	for _, s := range spans {
		edges = append(edges, edge{s.first, 1}, edge{s.last, -1})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(a.at.Compare(b.at), b.count-a.count) }) // ends belong to a span
	now, most := 0, 0
	for _, e := range edges {
		now += e.count
		most = max(most, now)
	}
	return most
}
