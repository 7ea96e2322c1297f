// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// How many resources the schema lets a status list.
const (
	mostResources = 64 // of a policy
	mostOfANode   = 16
)

// resources sums what nodes advertise of GPUs and instances, and what they shall, by name; the first most of them.
func resources(members []member, most int) []v1alpha1.ResourceCount {
	sums := map[string]*v1alpha1.ResourceCount{}
	sum := func(name string) *v1alpha1.ResourceCount {
		if sums[name] == nil {
			sums[name] = &v1alpha1.ResourceCount{Name: name}
		}
		return sums[name]
	}
	for _, m := range members {
		if m.wish != nil {
			for name, count := range m.wish.Config.Resources {
				sum(name).Expected += count
			}
			for name, replicas := range m.wish.Config.Replicas {
				sum(name).Oversubscription = max(sum(name).Oversubscription, replicas)
			}
		}
		for name, count := range m.node.Allocatable {
			if count != 0 && ofGPU(name) {
				sum(name).Advertised += count
			}
		}
	}
	var list []v1alpha1.ResourceCount
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		list = append(list, *sums[name])
	}
	return list[:min(len(list), most)]
}

// offered is what a node advertises of GPUs and instances.
func offered(n *Node) map[string]int64 {
	offers := map[string]int64{}
	for name, count := range n.Allocatable {
		if count != 0 && ofGPU(name) {
			offers[name] = count
		}
	}
	return offers
}
