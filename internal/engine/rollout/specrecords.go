// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
)

// recordRelease records on a node how its policy releases it.
func recordRelease(m *member, by *v1alpha1.GPUSharingPolicy, groups map[string]*Group) {
	spec := m.Node.GPU.Spec
	groups[by.Name].Unrecorded++
	if m.Node.NoGPUNode || spec.Reboot != nil || spec.MIGConfigName != "" || slices.ContainsFunc(m.Actions, action.SetsSpec) {
		return // the write that ends that records it
	}
	spec = *spec.DeepCopy()
	spec.Release = node.ReleaseFor(by)
	m.Actions = append(m.Actions, action.SetSpec{
		Node: m.Node.Name, Spec: spec, Policy: action.PolicyRef{Name: by.Name, Generation: by.Generation}, Why: "recording how the policy releases the node",
	})
}

// recordMemoryOwner records who else limits memory on a node that is to limit it, whatever the node waits for, so that its agent leaves that
// alone.
func recordMemoryOwner(m *member) {
	spec, want := m.Node.GPU.Spec, ""
	if spec.Memory.Limited() != v1alpha1.MemoryLimitNone {
		want = m.Node.MemoryOwner
	}
	if want == spec.MemoryOwner || slices.ContainsFunc(m.Actions, action.SetsSpec) {
		return
	}
	spec = *spec.DeepCopy()
	spec.MemoryOwner = want
	m.Actions = append(m.Actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Policy: m.Ref(), Why: "recording who else limits memory"})
}

// recordAdminClaims records on a node of NVIDIA's DRA driver which claims are for administrators, so that its agent
// does not take their containers for users.
func recordAdminClaims(m *member) {
	spec, want := m.Node.GPU.Spec, node.AdminClaims(m.Node)
	governed := m.Policy != nil || spec.Baseline != nil
	if !governed || !m.ByClaims() || slices.Equal(want, spec.AdminClaims) || slices.ContainsFunc(m.Actions, action.SetsSpec) {
		return
	}
	spec = *spec.DeepCopy()
	spec.AdminClaims = want
	m.Actions = append(m.Actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Policy: m.Ref(), Why: "recording the ResourceClaims of monitors"})
}
