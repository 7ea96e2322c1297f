// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// gpuShape is a GPU as it will be: selected ones by the desired state, the others as they are.
type gpuShape struct {
	uuid      string
	index     int32
	product   string
	mig       bool
	instances []v1alpha1.InstanceCount // by profile
}

// String names the GPU for a message.
func (g gpuShape) String() string { return fmt.Sprintf("GPU %d (%s)", g.index, g.product) }

// gpus are the GPUs of the node as they will be, by index.
func (n Node) gpus() []gpuShape {
	desired := map[string]v1alpha1.DeviceSharing{}
	for _, d := range n.Desired {
		desired[d.UUID] = d.Sharing
	}
	shapes := make([]gpuShape, 0, len(n.Devices))
	for _, d := range n.Devices {
		sharing, selected := desired[d.UUID]
		if !selected {
			sharing = d.Sharing
		}
		instances := slices.Clone(sharing.Instances)
		slices.SortFunc(instances, func(a, b v1alpha1.InstanceCount) int { return cmp.Compare(a.Profile, b.Profile) })
		shapes = append(shapes, gpuShape{
			uuid: d.UUID, index: d.Index, product: d.Product,
			mig: sharing.MIGMode == v1alpha1.MIGModeEnabled, instances: instances,
		})
	}
	slices.SortFunc(shapes, func(a, b gpuShape) int { return cmp.Compare(a.index, b.index) })
	return shapes
}

// migDocument is the configuration for MIG. Replicas are given per profile, and for all GPUs that stay whole; the
// plugin takes them per resource, which under the strategy single is the same one for all profiles.
func migDocument(s v1alpha1.Sharing, n Node) (config, error) {
	c := config{
		migStrategy: migMixed, sharing: "timeSlicing", rename: plan.Renamed(s), failMany: s.RefusesMoreThanOne(), replicas: map[string]int32{},
	}
	if s.MIG.ResourceNames == v1alpha1.MIGResourceNamesUniform {
		c.migStrategy = migSingle
	}
	whole := slices.ContainsFunc(n.gpus(), func(g gpuShape) bool { return !g.mig })
	if s.MIG.WholeGPUs != nil && whole {
		c.replicas[plan.ResourceGPU] = s.MIG.WholeGPUs.Replicas
	}
	for profile, replicas := range n.Replicas {
		name := c.instanceResource(profile)
		if other, given := c.replicas[name]; given && other != replicas {
			return config{}, &plan.Problem{
				Reason: v1alpha1.ReasonReplicasDiffer,
				Message: fmt.Sprintf("layouts ask for %d and for %d replicas of %s; NVIDIA's device plugin shares per resource name: "+
					"give every layout of the node the same replicas", min(other, replicas), max(other, replicas), name),
			}
		}
		c.replicas[name] = replicas
	}
	return c, nil
}

// advertisable says what in a configuration the plugin would refuse on these GPUs, or advertise though it cannot be
// used (device_map.go and validateFlags of the plugin).
func advertisable(c config, gpus []gpuShape) error {
	switch c.migStrategy {
	case migNone:
		return withoutMIG(c, gpus)
	case migSingle:
		return uniform(gpus)
	}
	return nil
}

// withoutMIG: with the strategy none, a GPU in MIG mode would be advertised as a whole one that no container can use,
// and with MPS the plugin does not start.
func withoutMIG(c config, gpus []gpuShape) error {
	for _, g := range gpus {
		if !g.mig {
			continue
		}
		what := "would be advertised as a whole GPU, which no container can use"
		switch c.sharing {
		case "mps":
			what = "keeps NVIDIA's device plugin from serving MPS on the node"
		case "timeSlicing":
			what = "would be time-sliced as a whole GPU, which no container can use"
		}
		return &plan.Problem{
			Reason: v1alpha1.ReasonMIGActive,
			Message: fmt.Sprintf("%s is in MIG mode and not selected by the policy, and %s; "+
				"select it too by gpuSelector, or turn its MIG mode off", g, what),
		}
	}
	return nil
}

// uniform: the strategy single wants all GPUs in MIG mode, with instances of one and the same profile.
func uniform(gpus []gpuShape) error {
	const rest = "; resourceNames Uniform needs instances of one profile on every GPU of the node: use PerProfile, or give every GPU the same layout"
	first := ""
	for _, g := range gpus {
		var found string
		switch {
		case !g.mig:
			found = fmt.Sprintf("%s stays whole", g)
		case len(g.instances) == 0:
			found = fmt.Sprintf("%s is in MIG mode without instances", g)
		case len(g.instances) > 1:
			found = fmt.Sprintf("%s has instances of %s and of %s", g, g.instances[0].Profile, g.instances[1].Profile)
		case first != "" && first != g.instances[0].Profile:
			found = fmt.Sprintf("%s has instances of %s and GPUs before it of %s", g, g.instances[0].Profile, first)
		default:
			first = g.instances[0].Profile
			continue
		}
		return &plan.Problem{Reason: v1alpha1.ReasonMixedInstances, Message: found + rest}
	}
	return nil
}

// sharedSuffix is what renameByDefault appends.
const sharedSuffix = ".shared"

// instanceResource is the name under which the plugin advertises an instance.
func (c config) instanceResource(profile string) string {
	if c.migStrategy == migSingle {
		return plan.ResourceGPU
	}
	return plan.ResourceOf(profile)
}

// advertised counts the resources of the node, and names those that are advertised more than once.
func (c config) advertised(gpus []gpuShape) (map[string]int64, map[string]int32) {
	counts := map[string]int64{}
	for _, g := range gpus {
		switch {
		case !g.mig:
			counts[plan.ResourceGPU]++
		case c.migStrategy == migNone:
		default:
			for _, i := range g.instances {
				counts[c.instanceResource(i.Profile)] += int64(i.Count)
			}
		}
	}
	resources, replicas := map[string]int64{}, map[string]int32{}
	for name, count := range counts {
		factor := c.replicas[name]
		if factor < 2 {
			resources[name] = count
			continue
		}
		if c.rename {
			name += sharedSuffix
		}
		resources[name] = count * int64(factor)
		replicas[name] = factor
	}
	return resources, replicas
}
