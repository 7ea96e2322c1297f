// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// The agent has the driver open, so it runs where v1alpha1.LabelRunsAgent is true: k8s-driver-manager and mig-manager
// stop that label and wait until the pods that select it are gone. The GPU Operator sets it since v26.7. On other
// nodes we do, once in an hour at most, and never change another value. For a GPUCluster the GPU Operator removes it,
// and the agent runs by cluster.LabelDRADriver.

const (
	labelOperands = cluster.DeployPrefix + "operands" // false: no deploy label stays on the node
	// agentLabelSet begins the value of v1alpha1.AnnotationRunsAgent.
	agentLabelSet = "true"
)

// allowAgent sets the label that the agent's DaemonSet selects where it is absent.
func allowAgent(m *member) {
	labels := m.Node.Labels
	if cluster.OfGPUCluster(labels) || labels[v1alpha1.LabelRunsAgent] != "" || labels[labelOperands] == "false" || labels[cluster.LabelPresent] == "false" {
		return
	}
	if at, did := timing.Stamped(m.Node.Annotations[v1alpha1.AnnotationRunsAgent], agentLabelSet); did && m.Snapshot.Now.Sub(at) < timing.Patience {
		m.After = timing.Sooner(m.After, at.Add(timing.Patience).Sub(m.Snapshot.Now)) // another controller removed it
		return
	}
	patch := action.PatchNode{
		Node: m.Node.Name, Why: "allowing the agent on the node",
		Labels:      map[string]*string{v1alpha1.LabelRunsAgent: new("true")},
		Annotations: map[string]*string{v1alpha1.AnnotationRunsAgent: new(timing.Stamp(agentLabelSet, m.Snapshot.Now))},
	}
	m.Actions = append(m.Actions, patch)
}
