// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

// GPUs come and go one by one: one is replaced and has another UUID, another is no longer selected. So the baseline has an
// entry for each GPU that the operator changes, and for no other:
//
//	added     in the write of the spec that first lists the GPU, from what the agent reports: nobody has changed it before that
//	used      when no policy selects the GPU, when the desired state fails and the last good state does not list it, and when no
//	          policy governs the node
//	removed   once a GPU that the policy does not select is back in that state; from then on it is the user's

// changed returns the GPUs that the operator has changed, each in its state before that. Where a policy left the node as it
// is (releasePolicy Retain), these GPUs are the user's.
func changed(spec v1alpha1.GPUNodeSpec) []v1alpha1.DeviceSpec {
	if spec.Baseline == nil || leftAsIs(spec) {
		return nil
	}
	return spec.Baseline.Devices
}

// leftAsIs reports whether the policy that governed the node last has left it as it is.
func leftAsIs(spec v1alpha1.GPUNodeSpec) bool { return spec.PolicyName == "" && retained(spec) }

// restorable returns the GPUs that the operator has changed and the node still has, each in the state to which it returns. A
// GPU without an entry in the baseline, though the operator changed it, returns to no MIG mode and no MPS daemon: the state
// of a GPU that nobody has partitioned.
func restorable(n *v1alpha1.GPUNode, have []gpu.Device) []v1alpha1.DeviceSpec {
	if n.Spec.Baseline == nil {
		return nil
	}
	devices := present(n.Spec.Baseline.Devices, have)
	for _, d := range have {
		if asked(n, d.UUID) && !lists(devices, d.UUID) {
			devices = append(devices, unpartitioned(d.UUID))
		}
	}
	return devices
}

// asked reports whether the spec, or the last good state, asks for a state of a GPU.
func asked(n *v1alpha1.GPUNode, uuid string) bool {
	good := n.Status.Rollout.LastGood
	return lists(n.Spec.Devices, uuid) || good != nil && lists(good.Devices, uuid)
}

func unpartitioned(uuid string) v1alpha1.DeviceSpec {
	return v1alpha1.DeviceSpec{UUID: uuid, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}}
}

// record adds to the baseline the GPUs of the target that it does not list.
func (v *view) record(spec *v1alpha1.GPUNodeSpec) {
	if spec.Baseline == nil {
		spec.Baseline = v.found()
	}
	if v.by == nil {
		return // nothing new is changed
	}
	devices := slices.Clone(spec.Baseline.Devices)
	if leftAsIs(*spec) {
		devices = slices.DeleteFunc(devices, func(d v1alpha1.DeviceSpec) bool { return !lists(v.to.devices, d.UUID) })
	}
	for _, d := range v.have {
		if lists(v.to.devices, d.UUID) && !lists(devices, d.UUID) {
			devices = append(devices, v.before(d))
		}
	}
	spec.Baseline.Devices = sorted(devices)
}

// before returns the state to which a GPU without an entry in the baseline returns: as it is, unless that is the operator's
// doing.
func (v *view) before(d gpu.Device) v1alpha1.DeviceSpec {
	sharing := plan.Observed(d)
	lost := v.node.GPU.Spec.Baseline == nil && v.inCharge()
	if lost || asked(&v.node.GPU, d.UUID) || sharing.MPS != nil && sharing.MPS.Owner == v1alpha1.MPSDaemonOwnerGPUSharing {
		return unpartitioned(d.UUID)
	}
	return v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: sharing}
}

// unrecorded reports whether the baseline lacks a GPU that is to be changed.
func (v *view) unrecorded() bool {
	b := v.node.GPU.Spec.Baseline
	return b == nil || v.by != nil && slices.ContainsFunc(v.to.devices, func(d v1alpha1.DeviceSpec) bool {
		return !lists(b.Devices, d.UUID)
	})
}

// withoutRestored leaves out the GPUs that the policy does not select and that are back in their baseline.
func (v *view) withoutRestored(devices []v1alpha1.DeviceSpec) []v1alpha1.DeviceSpec {
	if v.wish == nil || v.fallsBack {
		return devices
	}
	return slices.DeleteFunc(slices.Clone(devices), func(d v1alpha1.DeviceSpec) bool { return lists(v.wish.Restored, d.UUID) })
}
