// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// nodeStateOf is the state of a node as the CLI, metrics and Events report it.
func nodeStateOf(m *member) NodeState {
	if m.CachedState != nil {
		return *m.CachedState
	}
	s := NodeState{
		Node: m.Node.Name, State: m.State, Reason: m.Reason, Message: m.Message, Plan: plannedChanges(m.View),
		Blockers: node.BlockersOf(m.View), ConfigName: m.Target.Config, Advertised: m.View.Node.OfferedGPUs(m.View.Stack), Devices: m.Target.Devices,
		Retained: m.Policy == nil && node.Retained(m.Node.GPU.Spec),
	}
	if m.Policy != nil {
		s.Policy = m.Policy.Name
		sliced := m.Policy.Spec.Sharing.TimeSlicing
		s.Limited = sliced != nil && sliced.Memory.Limited() == v1alpha1.MemoryLimitEnforce
	}
	if m.Desired != nil {
		s.Expected, s.Replicas = m.Desired.Config.Resources, m.Desired.Config.Replicas
	}
	return s
}

// plannedChanges lists the steps of the plan. Nobody may change the list.
func plannedChanges(v *node.View) []string {
	if v.Lines == nil {
		v.Lines = new(describeSteps(v))
	}
	return *v.Lines
}

func describeSteps(v *node.View) []string {
	const most, length = 64, 256 // of the schema
	var steps []string
	if clears := node.ManagerClearing(v); clears != "" {
		steps = append(steps, format.Cut(clears, length))
	}
	if node.ExcludesNVIDIAMPS(v) && !node.MPSLabelOverridden(v) && node.OverriddenByNodeFeature(v) {
		steps = append(steps, format.Cut("keep NVIDIA's MPS DaemonSet off the node by NodeFeature "+action.OverrideName(v.Node.Name), length))
	}
	for _, s := range v.AgentSteps() {
		if len(steps) < most {
			steps = append(steps, format.Cut(s.String(), length))
		}
	}
	if node.OnlyRebootLeft(v) && len(steps) < most {
		steps = append(steps, "reboot the node")
	}
	return steps
}
