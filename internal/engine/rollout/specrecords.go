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
	groups[by.Name].Unrecorded++
	spec := &m.Node.GPU.Spec
	reboots := spec.Reboot != nil && spec.Reboot.BootID == m.Node.GPU.Status.BootID // a permission for an earlier boot stays, also while paused
	if m.Node.NoGPUNode || reboots || spec.MIGConfigName != "" {
		return // the write that ends that records it
	}
	ref := action.PolicyRef{Name: by.Name, Generation: by.Generation}
	recordInSpec(m, ref, "recording how the policy releases the node", func(spec *v1alpha1.GPUNodeSpec) { spec.Release = node.ReleaseFor(by) })
}

// recordMemoryOwner records who else limits memory on a node that is to limit it, whatever the node waits for, so that its agent leaves that
// alone.
func recordMemoryOwner(m *member) {
	if want := node.MemoryOwner(m.Node, m.Node.GPU.Spec.Memory); want != m.Node.GPU.Spec.MemoryOwner {
		recordInSpec(m, m.Ref(), "recording who else limits memory", func(spec *v1alpha1.GPUNodeSpec) { spec.MemoryOwner = want })
	}
}

// recordAdminClaims records on a node of NVIDIA's DRA driver which claims are for administrators, so that its agent
// does not take their containers for users.
func recordAdminClaims(m *member) {
	spec, want := m.Node.GPU.Spec, node.AdminClaims(m.Node)
	if governed := m.Policy != nil || spec.Baseline != nil; governed && (m.ByClaims() || len(want) > 0) && !slices.Equal(want, spec.AdminClaims) {
		recordInSpec(m, m.Ref(), "recording the ResourceClaims of monitors", func(spec *v1alpha1.GPUNodeSpec) { spec.AdminClaims = want })
	}
}

// recordInSpec writes the spec of a node with something recorded in it. Another write of it records the same.
func recordInSpec(m *member, of action.PolicyRef, why string, record func(*v1alpha1.GPUNodeSpec)) {
	if slices.ContainsFunc(m.Actions, action.SetsSpec) {
		return
	}
	spec := *m.Node.GPU.Spec.DeepCopy()
	record(&spec)
	m.Actions = append(m.Actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Policy: of, Why: why})
}
