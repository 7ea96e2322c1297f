// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/dra"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/group"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/nvidiadra"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
)

// configureDRA decides which DeviceClasses must exist where NVIDIA's DRA driver serves nodes, and removes DeviceTaintRules of nodes that are
// gone. A class stays while a node has instances of its profile, or is to have some, and while a pod or ResourceClaim names it.
func (d *Decision) configureDRA(w *world.World, all []*group.Member) {
	var profiles []string
	nodes := make(map[string]bool, len(w.DRA.Ruled))
	for _, m := range all {
		if len(w.DRA.Ruled) > 0 {
			nodes[m.Node.Name] = true
		}
		if m.ByDriver() && !m.OnPaper() {
			profiles = append(profiles, profilesOn(m)...)
		}
	}
	write, remove := dra.Classes(w.DRA.Classes, profiles, func(c dra.Class) bool { return isNamed(w, c) })
	for _, class := range write {
		d.Actions, d.After = w.Repeats.Admit(d.Actions, action.WriteClass{Class: class}, w.Now, d.After)
	}
	for _, name := range remove {
		d.Actions, d.After = w.Repeats.Admit(d.Actions, action.DeleteClass{Name: name}, w.Now, d.After)
	}
	for _, node := range w.DRA.Ruled {
		if !nodes[node] {
			d.Actions = append(d.Actions, action.UntaintDevices{Node: node})
		}
	}
}

// profilesOn are the MIG profiles that the operator offers on a node, or is to offer.
func profilesOn(m *group.Member) []string {
	if m.Unsupported != nil && m.Node.GPU.Spec.Baseline == nil {
		return nil
	}
	profiles := nvidiadra.Profiles(m.Node.GPU.Spec.Devices)
	if m.Policy != nil {
		profiles = append(profiles, nvidiadra.Profiles(m.Target.Devices)...)
	}
	return profiles
}

// isNamed reports whether a pod or a ResourceClaim asks for devices of a class.
func isNamed(w *world.World, c dra.Class) bool {
	asks := func(p world.Pod) bool { return c.Resource != "" && p.Asks[c.Resource] > 0 }
	return slices.Contains(w.DRA.Named, c.Name) || slices.ContainsFunc(w.Unscheduled, asks) ||
		slices.ContainsFunc(w.Nodes, func(n world.Node) bool { return slices.ContainsFunc(n.Pods, asks) })
}
