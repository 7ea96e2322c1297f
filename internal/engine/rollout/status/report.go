// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/eviction"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/group"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Report is the state of a node as the CLI, metrics and Events report it.
func Report(m *group.Member) group.NodeState {
	if m.Settled != nil {
		return *m.Settled
	}
	s := group.NodeState{
		Node: m.Node.Name, State: m.State, Reason: m.Reason, Message: m.Message, Plan: planned(m.View),
		Blockers: eviction.Blockers(m.View), ConfigName: m.Target.Config, Advertised: offered(m.View), Devices: m.Target.Devices,
		Retained: m.Policy == nil && view.Retained(m.Node.GPU.Spec),
	}
	if m.Policy != nil {
		s.Policy = m.Policy.Name
	}
	if m.Desired != nil {
		s.Expected, s.Replicas = m.Desired.Config.Resources, m.Desired.Config.Replicas
	}
	return s
}

// planned lists the steps of the plan. Nobody may change the list.
func planned(v *view.View) []string {
	if v.Lines == nil {
		v.Lines = new(describe(v))
	}
	return *v.Lines
}

func describe(v *view.View) []string {
	const most, length = 64, 256 // of the schema
	var steps []string
	if v.Partitions() {
		steps = append(steps, format.Cut(nvidiamig.Clearing(v), length))
	}
	if view.ExcludesNVIDIA(v) && !view.Overridden(v) && view.ByNodeFeature(v) {
		steps = append(steps, "keep NVIDIA's MPS DaemonSet off the node by NodeFeature "+action.OverrideName(v.Node.Name))
	}
	for _, s := range v.Steps {
		if len(steps) < most && (!v.Managed() || !plan.ChangesMIG(s)) {
			steps = append(steps, format.Cut(s.String(), length))
		}
	}
	if view.Reboots(v) && len(steps) < most {
		steps = append(steps, "reboot the node")
	}
	return steps
}
