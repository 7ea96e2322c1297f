// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// Replicas is how many times the instances of each profile are advertised on the selected GPUs of one node, by the
// profile's exact name; a profile that is advertised once is not listed. Errors: *Problem, with reason ReplicasDiffer
// where instances of one profile are to have different replicas: NVIDIA's device plugin shares per resource name.
func Replicas(s v1alpha1.Sharing, selected []gpu.Device) (map[string]int32, error) {
	if s.Strategy != v1alpha1.StrategyMIG {
		return nil, nil
	}
	partitions, err := partitionsOf(*s.MIG, selected)
	if err != nil {
		return nil, err
	}
	return replicasOf(partitions)
}

func replicasOf(partitions []partition) (map[string]int32, error) {
	by := map[string]int32{}
	first := map[string]gpu.Device{} // with instances of the profile
	for _, p := range partitions {
		replicas, err := layoutReplicas(p)
		if err != nil {
			return nil, err
		}
		for _, profile := range slices.Sorted(maps.Keys(p.instances)) {
			n := max(replicas[profile], 1)
			other, seen := first[profile]
			if seen && by[profile] != n {
				return nil, problem(v1alpha1.ReasonReplicasDiffer, "instances %s would be advertised %d times on %s and %d times "+
					"on %s, and NVIDIA's device plugin has one number for a resource of a node; give the profile the same "+
					"replicas in each layout", profile, by[profile], other, n, p.device)
			}
			by[profile] = n
			if !seen {
				first[profile] = p.device
			}
		}
	}
	maps.DeleteFunc(by, func(_ string, n int32) bool { return n == 1 })
	return by, nil
}

// layoutReplicas is a layout's replicas by exact profile name on one GPU.
func layoutReplicas(part partition) (map[string]int32, error) {
	asked := slices.Clone(part.layout.Instances)
	if part.layout.Fill != "" {
		asked = append(asked, v1alpha1.MIGInstances{Profile: part.layout.Fill, Replicas: part.layout.Replicas})
	}
	by := map[string]int32{}
	for _, i := range asked {
		p, err := mig.Resolve(part.device, string(i.Profile))
		if err != nil {
			return nil, packingProblem(err)
		}
		replicas := max(i.Replicas, 1)
		if n, ok := by[p.Name]; ok && n != replicas {
			return nil, problem(v1alpha1.ReasonReplicasDiffer, "the layout asks for %d and for %d replicas of %s on %s; name the profile once",
				n, replicas, p.Name, part.device)
		}
		by[p.Name] = replicas
	}
	return by, nil
}
