// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"hash/maphash"
	"slices"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// demandOf is the demand of a pod; requests is false for one that requests no GPU or is ending.
func demandOf(p *cluster.Pod) (d Demand, requests bool) {
	if len(p.Requests) == 0 || p.Terminating {
		return Demand{}, false
	}
	for name, n := range p.Requests {
		d.Requests += hashPair(name, strconv.FormatInt(n, 10))
	}
	for name, value := range p.NodeSelector {
		d.Selector += hashPair(name, value)
	}
	return d, true
}

// demandsOf lists what the pods of a node request of shared GPUs.
func demandsOf(pods []cluster.Pod) []podDemand {
	var demands []podDemand
	for i := range pods {
		if d, requests := demandOf(&pods[i]); requests {
			demands = append(demands, podDemand{Demand: d, Pod: i})
		}
	}
	return demands
}

// waitingDemand are the pods on no node that have the same demand, as indexes in Snapshot.Unscheduled.
type waitingDemand struct {
	Demand
	pods []int
}

// podQueue are the pods on no node by their demand.
type podQueue struct {
	version int64 // of Snapshot.Unscheduled
	waiting []waitingDemand
}

// Of returns the pods on no node by their demand, in their order.
func (q *podQueue) Of(s *cluster.Snapshot) []waitingDemand {
	if s.UnscheduledVersion != 0 && q.version == s.UnscheduledVersion {
		return q.waiting
	}
	*q = podQueue{version: s.UnscheduledVersion}
	at := map[Demand]int{}
	for p := range s.Unscheduled {
		d, requests := demandOf(&s.Unscheduled[p])
		if !requests {
			continue
		}
		i, known := at[d]
		if !known {
			i, at[d] = len(q.waiting), len(q.waiting)
			q.waiting = append(q.waiting, waitingDemand{Demand: d})
		}
		q.waiting[i].pods = append(q.waiting[i].pods, p)
	}
	return q.waiting
}

// pairSeed is drawn when the program starts: nobody can compute names and values whose hashes add up to those of others.
var pairSeed = maphash.MakeSeed()

// hashPair is a hash of a name and a value, another in each process.
func hashPair(name, value string) uint64 {
	return maphash.Comparable(pairSeed, [2]string{name, value})
}

// labelIndex finds nodes by the value of a label, for those labels that pods select by.
type labelIndex map[string]map[string][]*offer

// with are the offers of the nodes on which a label has a value.
func (i *unmetFinder) with(name, value string) []*offer {
	if i.labels == nil {
		i.labels = labelIndex{}
	}
	values := i.labels[name]
	if values == nil {
		values = map[string][]*offer{}
		for _, o := range i.offers {
			if has, labelled := o.Labels[name]; labelled {
				values[has] = append(values[has], o)
			}
		}
		i.labels[name] = values
	}
	return values[value]
}

// admitting are the offers of the nodes that a pod's node selector admits.
func (i *unmetFinder) admitting(p *cluster.Pod) []*offer {
	var fewest []*offer
	selects := 0
	for name, value := range p.NodeSelector {
		if strings.HasPrefix(name, cluster.NvidiaDomain) {
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
	return slices.DeleteFunc(slices.Clone(fewest), func(o *offer) bool { return !selectorAdmits(p, o.Labels) })
}

// policiesFor are the policies some of whose nodes a waiting pod's node selector admits.
func (i *unmetFinder) policiesFor(p *cluster.Pod, d Demand) []string {
	policies, known := i.waiting[d.Selector]
	if !known {
		seen := map[string]bool{"": true}
		for _, o := range i.admitting(p) {
			if !seen[o.Policy] {
				seen[o.Policy] = true
				policies = append(policies, o.Policy)
			}
		}
		i.waiting[d.Selector] = policies
	}
	return policies
}
