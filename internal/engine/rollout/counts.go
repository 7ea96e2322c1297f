// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
)

// How many resources the schema lets a status list.
const (
	mostResources = 64 // of a policy
	mostOfANode   = 16

	longestResource = 63 // its name; one that is longer is no resource of the operator's
)

// countsOf returns what a node advertises of GPUs and instances and what it is expected to, by resource.
func countsOf(v *node.View) []v1alpha1.ResourceCount {
	counts := map[string]v1alpha1.ResourceCount{}
	if v.Desired != nil {
		for name, count := range v.Desired.Config.Resources {
			c := counts[name]
			c.Expected = count
			counts[name] = c
		}
		for name, replicas := range v.Desired.Config.Replicas {
			c := counts[name]
			c.Oversubscription = replicas
			counts[name] = c
		}
	}
	for name, count := range v.Node.OfferedGPUs(v.Stack) {
		if len(name) <= longestResource {
			c := counts[name]
			c.Advertised = count
			counts[name] = c
		}
	}
	list := make([]v1alpha1.ResourceCount, 0, len(counts))
	for name, c := range counts {
		c.Name = name
		list = append(list, c)
	}
	return list
}

// resourceCounts sums the counts of nodes by resource; the first most of them by name.
func resourceCounts(members []*member, most int) []v1alpha1.ResourceCount {
	sums := map[string]*v1alpha1.ResourceCount{}
	for _, m := range members {
		for _, c := range m.Demand.Counts {
			sum := sums[c.Name]
			if sum == nil {
				sum = &v1alpha1.ResourceCount{Name: c.Name}
				sums[c.Name] = sum
			}
			sum.Expected += c.Expected
			sum.Advertised += c.Advertised
			sum.Oversubscription = max(sum.Oversubscription, c.Oversubscription)
		}
	}
	var list []v1alpha1.ResourceCount
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		list = append(list, *sums[name])
	}
	return list[:min(len(list), most)]
}
