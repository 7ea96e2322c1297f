// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"path"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// partition is what a layout makes of one GPU.
type partition struct {
	device    gpu.Device
	layout    v1alpha1.MIGLayout
	instances map[string]int // by exact profile name
}

// resolveMIG gives each GPU the instances of the first layout that matches it, by their exact names; a GPU that none
// matches stays whole.
func resolveMIG(m v1alpha1.MIG, selected []gpu.Device) ([]v1alpha1.DeviceSpec, error) {
	partitions, err := partitionsOf(m, selected)
	if err != nil {
		return nil, err
	}
	if m.WholeGPUs != nil {
		if _, err := resolveTimeSlicing(v1alpha1.TimeSlicing{}, without(partitions, selected)); err != nil {
			return nil, err
		}
	}
	specs := wholeGPUs(selected)
	for _, p := range partitions {
		spec := specOf(specs, p.device.UUID)
		spec.Sharing = v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: instanceCounts(p.instances)}
	}
	if m.ResourceNames == v1alpha1.MIGResourceNamesUniform {
		if err := differ(specs, selected); err != nil {
			return nil, err
		}
	}
	_, err = replicasOf(partitions)
	return specs, err
}

// partitionsOf finds the layouts of the GPUs that have one.
func partitionsOf(m v1alpha1.MIG, selected []gpu.Device) ([]partition, error) {
	var partitions []partition
	for _, d := range selected {
		layout := LayoutOf(m, d)
		if layout == nil {
			continue
		}
		instances, err := resolveLayout(*layout, d)
		if err != nil {
			return nil, err
		}
		partitions = append(partitions, partition{device: d, layout: *layout, instances: instances})
	}
	if len(partitions) == 0 && len(selected) > 0 {
		return nil, problem(v1alpha1.ReasonNoLayoutMatches, "no layout of sharing.mig.layouts is for %s; add one that matches "+
			"in layouts[].gpus, or leave the node out of the policy", devices(selected))
	}
	return partitions, nil
}

// without lists the GPUs that stay whole.
func without(partitions []partition, selected []gpu.Device) []gpu.Device {
	return slices.DeleteFunc(slices.Clone(selected), func(d gpu.Device) bool {
		return slices.ContainsFunc(partitions, func(p partition) bool { return p.device.UUID == d.UUID })
	})
}

// LayoutOf is the first layout for a GPU; nil if there is none.
func LayoutOf(m v1alpha1.MIG, d gpu.Device) *v1alpha1.MIGLayout {
	for i := range m.Layouts {
		if Matches(m.Layouts[i].GPUs, d) {
			return &m.Layouts[i]
		}
	}
	return nil
}

// Matches reports whether a selection is for a GPU; an absent one is for every GPU.
func Matches(m *v1alpha1.GPUMatch, d gpu.Device) bool {
	if m == nil {
		return true
	}
	product := gpu.ProductLabel(d.Product)
	inProducts := len(m.Products) == 0 || slices.ContainsFunc(m.Products, func(pattern string) bool {
		ok, err := path.Match(pattern, product)
		return err == nil && ok
	})
	inIndexes := len(m.Indexes) == 0 || slices.ContainsFunc(m.Indexes, func(i int32) bool { return int(i) == d.Index })
	return inProducts && inIndexes
}

// resolveLayout counts a layout's instances on one GPU by exact profile name, and makes sure that they fit.
func resolveLayout(l v1alpha1.MIGLayout, d gpu.Device) (map[string]int, error) {
	if err := virtual(d); err != nil {
		return nil, err
	}
	if !d.MIGCapable {
		return nil, noMIG(d)
	}
	if l.Fill != "" {
		return resolveFill(l.Fill, d)
	}
	count := map[string]int{}
	for _, i := range l.Instances {
		p, err := mig.Resolve(d, string(i.Profile))
		if err != nil {
			return nil, packingProblem(err)
		}
		count[p.Name] += int(i.Count) // 1g and 1g.5gb may be the same profile
	}
	if _, err := mig.Pack(d, count); err != nil {
		return nil, packingProblem(err)
	}
	return count, nil
}

// Means reports whether a name that a policy gives means a profile of a GPU.
func Means(name v1alpha1.MIGProfile, d gpu.Device, profile string) bool {
	p, err := mig.Resolve(d, string(name))
	return err == nil && p.Name == profile
}

func resolveFill(name v1alpha1.MIGProfile, d gpu.Device) (map[string]int, error) {
	p, err := mig.Resolve(d, string(name))
	if err != nil {
		return nil, packingProblem(err)
	}
	n := mig.Fill(d, p)
	if n == 0 {
		return nil, problem(v1alpha1.ReasonLayoutDoesNotFit,
			"the driver names no place for %s on %s; choose another profile for fill", p.Name, d)
	}
	return map[string]int{p.Name: n}, nil
}

// differ refuses what resourceNames Uniform (NVIDIA's strategy single) cannot advertise: it ends when a node has GPUs with and
// without instances, or instances of two profiles (NVIDIA/k8s-device-plugin, internal/rm/device_map.go).
func differ(specs []v1alpha1.DeviceSpec, selected []gpu.Device) error {
	for i, spec := range specs {
		if len(spec.Sharing.Instances) == 1 && spec.Sharing.Instances[0].Profile == firstProfile(specs) {
			continue
		}
		other := slices.IndexFunc(specs, func(s v1alpha1.DeviceSpec) bool { return len(s.Sharing.Instances) > 0 })
		if other == i {
			return problem(v1alpha1.ReasonMixedInstances, "resourceNames Uniform needs instances of one profile, and %s would get "+
				"%s; use PerProfile, or one profile", selected[i], describe(spec.Sharing))
		}
		return problem(v1alpha1.ReasonMixedInstances, "resourceNames Uniform needs the same one profile on every GPU of a node, and "+
			"%s would get %s but %s %s; use PerProfile, or layouts that give every GPU the same profile",
			selected[other], describe(specs[other].Sharing), selected[i], describe(spec.Sharing))
	}
	return nil
}

func firstProfile(specs []v1alpha1.DeviceSpec) string {
	for _, s := range specs {
		if len(s.Sharing.Instances) > 0 {
			return s.Sharing.Instances[0].Profile
		}
	}
	return ""
}
