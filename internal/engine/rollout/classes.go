// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// configureDRA decides which DeviceClasses must exist where NVIDIA's DRA driver serves nodes, and removes
// DeviceTaintRules of nodes that are gone, and those that another controller edited. A class stays while a node has
// instances of its profile, or is to have some, and while isNamed.
func (d *Decision) configureDRA(s *cluster.Snapshot, all []*member) {
	var classes []dra.Write
	nodes := make(map[string]bool, len(s.DRA.DevicesTaintedOn))
	for _, m := range all {
		if len(s.DRA.DevicesTaintedOn) > 0 {
			nodes[m.Node.Name] = true
		}
		if m.ByClaims() && !m.Paused() {
			classes = append(classes, classesOn(s, m)...)
		}
	}
	write, remove := dra.Classes(s.DRA.Classes, classes, func(c dra.Class) bool { return isNamed(s, c) })
	for _, class := range write {
		d.Actions, d.After = s.Repeats.Admit(d.Actions, action.WriteClass{Class: class}, s.Now, d.After)
	}
	for _, name := range remove {
		d.Actions, d.After = s.Repeats.Admit(d.Actions, action.DeleteClass{Name: name}, s.Now, d.After)
	}
	for _, name := range s.DRA.Edited { // the change that needs it makes another one
		d.Actions, d.After = s.Repeats.Admit(d.Actions, action.UntaintDevices{Node: name, Edited: true}, s.Now, d.After)
	}
	for _, name := range s.DRA.DevicesTaintedOn {
		if !nodes[name] {
			d.Actions = append(d.Actions, action.UntaintDevices{Node: name})
		}
	}
}

// classesOn are the classes of what the operator offers on a node, or is to offer. Those that lost their resource are
// written again where the node waits for it: another controller may have taken the resource, or the API server drops it
// as yet.
func classesOn(s *cluster.Snapshot, m *member) []dra.Write {
	if m.Unsupported != nil && m.Node.GPU.Spec.Baseline == nil {
		return slices.DeleteFunc(node.DeviceClasses(m.View), func(class dra.Write) bool {
			lost := dra.ClassProblem(s.DRA.Classes, class)
			return lost == nil || lost.Reason != v1alpha1.ReasonDRAUnavailable
		})
	}
	return append(node.DeviceClassesOf(m.Node.GPU.Spec.Devices), node.DeviceClasses(m.View)...)
}

// isNamed reports whether a policy, who uses a device or, while there is a policy, a pod or ResourceClaim that waits names
// a class: without one any tenant could keep it. A policy also does while no node has its instances: an autoscaler that
// has none left starts one for a pod only where the class is there.
func isNamed(s *cluster.Snapshot, c dra.Class) bool {
	governs := false
	for i := range s.Policies {
		if s.Policies[i].DeletionTimestamp.IsZero() {
			if governs = true; sharingNames(s.Policies[i].Spec.Sharing, c.Name) {
				return true
			}
		}
	}
	requests := func(p cluster.Pod) bool { return c.Resource != "" && p.Requests[c.Resource] > 0 }
	holds := func(o dra.Claim) bool { return len(o.Devices) > 0 && slices.Contains(o.Classes, c.Name) }
	nodes := s.Nodes
	if c.Name == dra.ForGPUs().Name { // pods request its resource of the device plugin too
		nodes = slices.DeleteFunc(slices.Clone(nodes), func(n cluster.Node) bool { return s.Plugin.StackOf(&n) == dra.DevicePlugin })
	}
	return governs && (slices.Contains(s.DRA.Named, c.Name) || len(nodes) > 0 && slices.ContainsFunc(s.Unscheduled, requests)) ||
		slices.ContainsFunc(nodes, func(n cluster.Node) bool {
			return slices.ContainsFunc(n.Pods, requests) || slices.ContainsFunc(n.Claims, holds)
		})
}

// sharingNames reports whether a policy's sharing offers what a class of the operator's is for.
func sharingNames(s v1alpha1.Sharing, class string) bool {
	if s.MIG == nil {
		return class == dra.ForGPUs().Name && s.Strategy != v1alpha1.StrategyMPS
	}
	return slices.ContainsFunc(s.MIG.Layouts, func(l v1alpha1.MIGLayout) bool {
		profiles := []v1alpha1.MIGProfile{l.Fill}
		if l.OnDemand != nil && l.OnDemand.Mode == v1alpha1.OnDemandModeApply {
			profiles = append(profiles, l.OnDemand.Profiles...)
		}
		return slices.ContainsFunc(profiles, func(p v1alpha1.MIGProfile) bool { return p != "" && dra.Means(string(p), class) }) ||
			slices.ContainsFunc(l.Instances, func(i v1alpha1.MIGInstances) bool { return dra.Means(string(i.Profile), class) })
	})
}
