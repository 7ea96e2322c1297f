// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// target is where a node is on its way to: what its policy wishes, its last good state, or its baseline.
type target struct {
	policy   string
	strategy v1alpha1.Strategy // of the policy that asked for it; empty: none did
	// actuator is who partitions the GPUs; empty: the agent.
	actuator v1alpha1.MIGActuator
	key      string // of the device-plugin configuration; empty: the node carries no label
	data     string // content of the key; empty if not known
	devices  []v1alpha1.DeviceSpec
	// expected is what the node must advertise; nil: not known, so it is not verified.
	expected map[string]int64
	// labels are, besides the key, what labels of the node go back to; a nil value removes the label.
	labels map[string]*string
	// before says that this is the state in which the node was found.
	before bool
	// final says that nothing of the operator stays behind: the GPUNode's spec is emptied.
	final bool
}

func (t target) hash() string { return policy.Hash(t.key, t.devices) }

// sharing is the target as the spec records it.
func (t target) sharing() *v1alpha1.NodeSharing {
	return &v1alpha1.NodeSharing{PolicyName: t.policy, Strategy: t.strategy, ConfigName: t.key, Devices: t.devices}
}

// targetOf is the wish of a policy.
func targetOf(w policy.Desired) target {
	return target{
		policy: w.Policy, key: w.Config.Key, data: w.Config.Data, devices: w.Devices, expected: w.Config.Resources,
	}
}

// fallback is where a node goes when the desired state failed: to its last good state, else to its baseline. GPUs that the last
// good state does not list, since they were deselected or have come later, go to their baseline.
func fallback(by string, n *v1alpha1.GPUNode, have []gpu.Device) target {
	if good := n.Status.Rollout.LastGood; good != nil {
		devices := present(good.Devices, have)
		for _, d := range restorable(n, have) {
			if !lists(devices, d.UUID) {
				devices = append(devices, d)
			}
		}
		return target{policy: by, strategy: good.Strategy, key: good.ConfigName, devices: devices}
	}
	t := baseline(n, have)
	t.policy, t.final, t.labels = by, false, nil
	return t
}

// baseline is the state in which the node was found.
func baseline(n *v1alpha1.GPUNode, have []gpu.Device) target {
	spec := n.Spec
	t := target{final: true, before: true, labels: map[string]*string{}}
	if spec.Baseline == nil {
		return t
	}
	t.key = spec.Baseline.Labels[v1alpha1.LabelConfig]
	t.devices = served(restorable(n, have), have)
	if before, had := spec.Baseline.Labels[v1alpha1.LabelMIGManager]; had {
		t.labels[v1alpha1.LabelMIGManager] = &before
	}
	t.actuator = spec.MIGActuator
	return t
}

// served adds NVIDIA's MPS daemon to the GPUs that it serves now. Where a node returns to its baseline, the configuration that NVIDIA's
// programs read is not the operator's any more, so the operator neither ends a daemon that it asks for nor waits for one.
func served(devices []v1alpha1.DeviceSpec, have []gpu.Device) []v1alpha1.DeviceSpec {
	devices = slices.Clone(devices)
	for i := range devices {
		at := slices.IndexFunc(have, func(d gpu.Device) bool { return d.UUID == devices[i].UUID })
		if at < 0 || have[at].State.MPS == nil || !have[at].State.MPS.External || devices[i].Sharing.MIGMode != v1alpha1.MIGModeDisabled {
			continue
		}
		devices[i].Sharing.MPS = plan.Observed(have[at]).MPS
	}
	return devices
}

// present leaves out GPUs that the node has lost since.
func present(devices []v1alpha1.DeviceSpec, have []gpu.Device) []v1alpha1.DeviceSpec {
	var kept []v1alpha1.DeviceSpec
	for _, d := range devices {
		if slices.ContainsFunc(have, func(h gpu.Device) bool { return h.UUID == d.UUID }) {
			kept = append(kept, d)
		}
	}
	return kept
}

// recordedLabels are the labels of a node that its baseline records.
func recordedLabels() []string {
	return []string{v1alpha1.LabelConfig, v1alpha1.LabelMIGManager, v1alpha1.LabelMIGConfig, v1alpha1.LabelMIGConfigState}
}

// wishes says whether a spec asks for the target already.
func wishes(spec v1alpha1.GPUNodeSpec, t target) bool {
	return spec.ConfigName == t.key && spec.MIGActuator == t.actuator && sameDevices(spec.Devices, t.devices)
}

// reached reports whether a target is the last good state of a node.
func reached(n *v1alpha1.GPUNode, t target) bool {
	good := n.Status.Rollout.LastGood
	return good != nil && good.ConfigName == t.key && sameDevices(good.Devices, t.devices)
}

func (v *view) reached() bool { return reached(&v.node.GPU, v.to) }

func sameDevices(a, b []v1alpha1.DeviceSpec) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(x v1alpha1.DeviceSpec) bool {
		return !slices.ContainsFunc(b, func(y v1alpha1.DeviceSpec) bool {
			return x.UUID == y.UUID && plan.Same(x.Sharing, y.Sharing)
		})
	})
}
