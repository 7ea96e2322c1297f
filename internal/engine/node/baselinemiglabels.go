// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// While the agent partitions a node, NVIDIA's mig-manager does not run there, and what its labels say is not true. Its state
// is removed. Its configuration gets a value of ours, because the GPU Operator sets all-disabled again where there is none and
// keeps what there is. No file of mig-manager's holds a configuration of that name: if it came back by mistake, it would
// refuse the value and change nothing. The release restores both labels together with the GPUs.
const (
	// migConfigClaimed is the value of v1alpha1.LabelMIGConfig while the agent partitions a node.
	migConfigClaimed = "gpu-sharing-operator"
	// migConfigDefault is what the GPU Operator sets where there is none.
	migConfigDefault = "all-disabled"
)

// claimMIG adds to a patch what mig-manager's labels are to be on a node that the agent partitions. It replaces what was
// there before, and no later value of another author.
func claimMIG(v *View, labels map[string]*string) {
	if !mustDisableMIGManager(v) || v.Target.Final {
		return
	}
	baseline := v.Node.GPU.Spec.Baseline
	if baseline == nil {
		baseline = baselineFound(v)
	}
	if _, has := v.Node.Labels[v1alpha1.LabelMIGConfigState]; has {
		labels[v1alpha1.LabelMIGConfigState] = nil
	}
	is, was := v.Node.Labels[v1alpha1.LabelMIGConfig], baseline.Labels[v1alpha1.LabelMIGConfig]
	_, deployed := v.Node.Labels[v1alpha1.LabelMIGManager]
	replaces := is == "" && deployed || is != "" && (slices.Contains([]string{was, migConfigDefault}, is) || migmanager.Ours(is))
	if replaces && !v.Reached() {
		labels[v1alpha1.LabelMIGConfig] = new(migConfigClaimed)
	}
}

// unclaimMIG adds to a patch what mig-manager's labels were before the agent partitioned the node.
func unclaimMIG(v *View, labels map[string]*string) {
	if !v.Target.Final || v.Node.Labels[v1alpha1.LabelMIGConfig] != migConfigClaimed {
		return
	}
	for _, name := range []string{v1alpha1.LabelMIGConfig, v1alpha1.LabelMIGConfigState} {
		labels[name] = nil
		if b := v.Node.GPU.Spec.Baseline; b != nil {
			if before, had := b.Labels[name]; had {
				labels[name] = &before
			}
		}
	}
}
