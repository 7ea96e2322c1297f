// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
)

// A policy that is gone cannot say how its nodes are released, so each GPUNode says it (spec.release). Users who set
// releasePolicy: Retain and then delete the policy rely on that. So it is recorded at once on every node that the policy has
// changed, whatever the state of the node and also while the rollout is paused, and the policy counts as observed only then.

// releases reports whether the GPUNode of a node records how a policy releases it, or has nothing to record.
func releases(n *Node, by *v1alpha1.GPUSharingPolicy) bool {
	spec := &n.GPU.Spec
	return by == nil || spec.Baseline == nil || spec.PolicyName != by.Name || equality.Semantic.DeepEqual(spec.Release, releaseOf(by))
}

// keepRelease records on a node how its policy releases it.
func (m *member) keepRelease(by *v1alpha1.GPUSharingPolicy, groups map[string]*group) {
	spec := m.node.GPU.Spec
	groups[by.Name].unrecorded++
	if spec.Reboot != nil || spec.MIGConfigName != "" || slices.ContainsFunc(m.actions, setsSpec) {
		return // the write that ends that records it
	}
	spec = *spec.DeepCopy()
	spec.Release = releaseOf(by)
	m.actions = append(m.actions, SetSpec{
		Node: m.node.Name, Spec: spec, Policy: PolicyRef{Name: by.Name, Generation: by.Generation}, Why: "recording how the policy releases the node",
	})
}

// observed returns the generation of the policy that its conditions are about.
func (g *group) observed() int64 {
	if g.unrecorded == 0 {
		return g.by.Generation
	}
	last, _ := condition.Find(g.by.Status.Conditions, v1alpha1.ConditionAccepted) // all that earlier versions reported
	return cmp.Or(g.by.Status.ObservedGeneration, last.ObservedGeneration)
}
