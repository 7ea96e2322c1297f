// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// That a wish was verified is news to nobody but us, and in the spec it would be a new generation, which the agent of every
// node looks at its GPUs and reports for. So while the wish in the spec is the last good state, the annotation
// v1alpha1.AnnotationVerified says so by the wish's hash, and lastGood is written only with the next wish. Decisions know
// nothing of that: what they read and what they write has lastGood.

// SpecOf is the spec of a GPUNode, with its last good state. It shares what it holds with the GPUNode.
func SpecOf(n *v1alpha1.GPUNode) v1alpha1.GPUNodeSpec {
	spec := n.Spec
	if n.Annotations[v1alpha1.AnnotationVerified] == policy.Hash(spec.ConfigName, spec.Devices) {
		spec.LastGood = wished(spec)
	}
	return spec
}

// Store is what a GPUNode has to hold so that its spec is as wanted: the spec, and the annotation; empty if there is to be
// none.
func Store(have *v1alpha1.GPUNode, want v1alpha1.GPUNodeSpec) (spec v1alpha1.GPUNodeSpec, verified string) {
	stays := equality.Semantic.DeepEqual(want.LastGood, have.Spec.LastGood)
	if stays || !equality.Semantic.DeepEqual(want.LastGood, wished(want)) {
		return want, ""
	}
	want.LastGood = have.Spec.LastGood
	return want, policy.Hash(want.ConfigName, want.Devices)
}

// wished is what a spec asks for, as the last good state once it is that.
func wished(spec v1alpha1.GPUNodeSpec) *v1alpha1.NodeSharing {
	return &v1alpha1.NodeSharing{PolicyName: spec.PolicyName, Strategy: spec.Strategy, ConfigName: spec.ConfigName, Devices: spec.Devices}
}
