// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// recordDevices adds to the baseline the GPUs of the target that it does not list. Those that it lists keep their order, so that the ones that
// were recorded first can be forgotten first once there are too many (cluster.Bounded).
func recordDevices(v *View, spec *v1alpha1.GPUNodeSpec) {
	if spec.Baseline == nil {
		spec.Baseline = baselineFound(v)
	}
	if v.Policy == nil {
		return // nothing new is changed
	}
	devices := slices.Clone(spec.Baseline.Devices)
	if releasedAsIs(*spec) {
		devices = slices.DeleteFunc(devices, func(d v1alpha1.DeviceSpec) bool { return !cluster.Lists(v.Target.Devices, d.UUID) })
	}
	var added []v1alpha1.DeviceSpec
	for _, d := range v.Devices {
		if cluster.Lists(v.Target.Devices, d.UUID) && !cluster.Lists(devices, d.UUID) {
			added = append(added, deviceBefore(v, d))
		}
	}
	spec.Baseline.Devices = cluster.Bounded(append(devices, cluster.SortedByUUID(added)...), v.Node.GPU.Status.Devices)
}

// The agent sets an interval as soon as GPUNode.spec has the former one, and then nothing else tells what that was. So the copy on the Node
// gets a former interval first, and the GPUNode takes it from there, as it takes all that it lacks (cluster.Node.WithCopy).

// recordFoundIntervals is the patch that records the time-slice intervals that the agent has found and waits to change; ok if there are any.
func recordFoundIntervals(v *View) (patch action.PatchNode, ok bool) {
	patch = v.Patch("recording the time-slice intervals that the GPUs had")
	if b := v.Node.GPU.Spec.Baseline; b != nil {
		_, ok = withFoundIntervals(v, b.Devices)
	}
	if ok {
		saveBaselineCopy(v, patch)
	}
	return patch, len(patch.Annotations) > 0
}

// withFoundIntervals adds the intervals that the agent has found and has not changed yet.
func withFoundIntervals(v *View, devices []v1alpha1.DeviceSpec) (with []v1alpha1.DeviceSpec, found bool) {
	return plan.WithFound(devices, v.Node.GPU.Spec.Devices, v.Devices)
}

// deviceBefore returns the state to which a GPU without an entry in the baseline returns: as it is, unless that is the operator's
// doing.
func deviceBefore(v *View, d gpu.Device) v1alpha1.DeviceSpec {
	sharing := plan.Observed(d)
	lost := v.Node.GPU.Spec.Baseline == nil && operatorInCharge(v)
	if lost || specRequests(&v.Node.GPU, d.UUID) || sharing.MPS != nil && sharing.MPS.Owner == v1alpha1.MPSDaemonOwnerGPUSharing {
		was := unpartitioned(d.UUID)
		if slices.ContainsFunc(v.Target.Devices, func(t v1alpha1.DeviceSpec) bool { return t.UUID == d.UUID && plan.Timed(t.Sharing) }) {
			was.Sharing.TimeSliceInterval = v1alpha1.TimeSliceIntervalDefault // what it has may be the operator's doing
		}
		return was
	}
	return v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: sharing}
}

// baselineUnrecorded reports whether the baseline lacks a GPU that is to be changed.
func baselineUnrecorded(v *View) bool {
	b := v.Node.GPU.Spec.Baseline
	return b == nil || v.Policy != nil && slices.ContainsFunc(v.Target.Devices, func(d v1alpha1.DeviceSpec) bool {
		return !cluster.Lists(b.Devices, d.UUID)
	})
}

// withoutRestored leaves out the GPUs that the policy does not select and that are back in their baseline.
func withoutRestored(v *View, devices []v1alpha1.DeviceSpec) []v1alpha1.DeviceSpec {
	if v.Desired == nil || v.FallsBack {
		return devices
	}
	return slices.DeleteFunc(slices.Clone(devices), func(d v1alpha1.DeviceSpec) bool { return cluster.Lists(v.Desired.Restored, d.UUID) })
}
