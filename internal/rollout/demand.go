// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"
	"strconv"
	"strings"
)

// A cluster may have ten thousand pods that wait and thousands of nodes. So that a pass does not cost the product of both, pods with
// the same request and node selector are one demand, which is compared with the nodes once, and only with those that have one of the
// labels that it selects.

// demand names a request of GPUs or instances and a node selector by their hashes: that is what decides where a pod may start.
type demand struct{ asks, selector uint64 }

// podDemand is the demand of a pod of a node.
type podDemand struct {
	demand
	pod int // index in Node.Pods
}

// demandOf is the demand of a pod; asks is false for one that asks for no GPU or is ending.
func demandOf(p *Pod) (d demand, asks bool) {
	if len(p.Asks) == 0 || p.Terminating {
		return demand{}, false
	}
	for name, n := range p.Asks {
		d.asks += hash(name, strconv.FormatInt(n, 10))
	}
	for name, value := range p.NodeSelector {
		d.selector += hash(name, value)
	}
	return d, true
}

func demandsOf(pods []Pod) []podDemand {
	var demands []podDemand
	for i := range pods {
		if d, asks := demandOf(&pods[i]); asks {
			demands = append(demands, podDemand{demand: d, pod: i})
		}
	}
	return demands
}

// waiting are the pods on no node that have the same demand, as indexes in World.Unscheduled.
type waiting struct {
	demand
	pods []int
}

// queue are the pods on no node by their demand.
type queue struct {
	version int64 // of World.Unscheduled
	waiting []waiting
}

// of returns the pods on no node by their demand, in their order.
func (q *queue) of(w *World) []waiting {
	if w.UnscheduledVersion != 0 && q.version == w.UnscheduledVersion {
		return q.waiting
	}
	*q = queue{version: w.UnscheduledVersion}
	at := map[demand]int{}
	for p := range w.Unscheduled {
		d, asks := demandOf(&w.Unscheduled[p])
		if !asks {
			continue
		}
		i, known := at[d]
		if !known {
			i, at[d] = len(q.waiting), len(q.waiting)
			q.waiting = append(q.waiting, waiting{demand: d})
		}
		q.waiting[i].pods = append(q.waiting[i].pods, p)
	}
	return q.waiting
}

// hash is the 64-bit FNV-1a hash of a name and a value.
func hash(name, value string) uint64 {
	const offset, prime = 14695981039346656037, 1099511628211
	h := uint64(offset)
	for _, s := range [...]string{name, "=", value} {
		for i := range len(s) {
			h = (h ^ uint64(s[i])) * prime
		}
	}
	return h
}

// labelIndex finds nodes by the value of a label, for those labels that pods select by.
type labelIndex map[string]map[string][]*offer

// with are the offers of the nodes on which a label has a value.
func (i *impact) with(name, value string) []*offer {
	if i.labels == nil {
		i.labels = labelIndex{}
	}
	values := i.labels[name]
	if values == nil {
		values = map[string][]*offer{}
		for _, o := range i.offers {
			if has, labelled := o.labels[name]; labelled {
				values[has] = append(values[has], o)
			}
		}
		i.labels[name] = values
	}
	return values[value]
}

// admitting are the offers of the nodes that a pod's node selector admits.
func (i *impact) admitting(p *Pod) []*offer {
	var fewest []*offer
	selects := 0
	for name, value := range p.NodeSelector {
		if strings.HasPrefix(name, nvidiaDomain) {
			continue
		}
		if found := i.with(name, value); selects == 0 || len(found) < len(fewest) {
			fewest = found
		}
		selects++
	}
	switch selects {
	case 0:
		return i.offers
	case 1:
		return fewest
	}
	return slices.DeleteFunc(slices.Clone(fewest), func(o *offer) bool { return !admits(p, o.labels) })
}

// policiesFor are the policies some of whose nodes a waiting pod's node selector admits.
func (i *impact) policiesFor(p *Pod, d demand) []string {
	policies, known := i.waiting[d.selector]
	if !known {
		seen := map[string]bool{"": true}
		for _, o := range i.admitting(p) {
			if !seen[o.policy] {
				seen[o.policy] = true
				policies = append(policies, o.policy)
			}
		}
		i.waiting[d.selector] = policies
	}
	return policies
}
