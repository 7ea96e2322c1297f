// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// A change of MIG instances for pods that wait (GPUNode.status.demand, which the desired state follows: policy.DesiredState) disturbs nobody.
// What it would destroy must be idle, or it does not begin; who comes nevertheless stays, and the taint goes. It never changes a MIG mode, and
// evicts nobody (DrainModeNever). What came of it concerns its GPU alone: it proves no configuration and halts no rollout (rollout/budget.go).
// Whether to wait, to try again or to do something else the demand controller decides anew.

// isForDemand reports whether the last good state and the desired one differ in nothing but the instances of GPUs on demand, or the node is
// on its way between two such states. Where that is lost with the GPUNode, the config that the node selects tells.
func isForDemand(v *View) bool {
	if v.Desired == nil || v.Desired.Config.Twin == "" || !plan.OnlyInstances(v.Steps) {
		return false
	}
	good := lastGood(&v.Node.GPU)
	if good == nil {
		others := func(s plan.Step) bool { return !slices.Contains(v.Desired.OnDemand, s.Device()) }
		return len(v.Steps) > 0 && !slices.ContainsFunc(v.Steps, others) && slices.ContainsFunc(v.Desired.Config.Keys(), func(key string) bool { return hasSelected(v, key) })
	}
	differs := false
	if len(good.Devices) != len(v.Desired.Devices) || !slices.Contains(v.Desired.Config.Keys(), good.ConfigName) {
		return false
	}
	for _, d := range v.Desired.Devices {
		at := slices.IndexFunc(good.Devices, func(g v1alpha1.DeviceSpec) bool { return g.UUID == d.UUID })
		if at < 0 {
			return false
		}
		if plan.Same(good.Devices[at].Sharing, d.Sharing) {
			continue
		}
		if differs = true; !slices.Contains(v.Desired.OnDemand, d.UUID) {
			return false
		}
	}
	return differs || v.InFlight()
}

// hasSelected reports whether a node selects a config or, where NVIDIA's DRA driver serves it, was asked for it last.
func hasSelected(v *View, config string) bool {
	if v.ReadsConfigs() {
		return v.Node.Labels[v1alpha1.LabelConfig] == config
	}
	_, asked := timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationSelected], config)
	return asked
}

// addJustBound adds the pods that a change for demand must not come before: they are bound to the node, ask for instances of which it destroys some, and
// the agent does not report yet which they are given. One that asks for others alone loses none.
func addJustBound(v *View) {
	if !v.ForDemand || v.ByClaims() { // a claim precedes the binding (awaitBindingsSettled)
		return
	}
	for i := range v.Node.Pods {
		if p := &v.Node.Pods[i]; p.GPU && p.Claim == "" && !podReported(v, p) && mayBeGiven(v, p) {
			addBlocker(v, unknownUse(p))
		}
	}
}
