// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// resolveTimeSlicing leaves the GPUs whole: NVIDIA's device plugin advertises them more than once. On the GPUs nothing
// changes but their time slice, where the policy names one.
func resolveTimeSlicing(t v1alpha1.TimeSlicing, selected []gpu.Device) ([]v1alpha1.DeviceSpec, error) {
	specs := wholeGPUs(selected)
	for i, d := range selected {
		if err := virtual(d); err != nil {
			return nil, err
		}
		if t.Memory != nil && d.MemoryMiB > 0 && MiB(t.Memory.PerReplica) >= d.MemoryMiB { // the guard would watch for what cannot happen
			return nil, problem(v1alpha1.ReasonMemoryLimitExceeded, "%s has %d MiB of memory, and no container can use more than "+
				"sharing.timeSlicing.memory.perReplica, %s: lower it, or leave it out for the GPU's memory divided by replicas",
				d, d.MemoryMiB, t.Memory.PerReplica)
		}
		specs[i].Sharing.TimeSliceInterval = t.Interval
	}
	return specs, nil
}

// The former interval of a GPU is known only once a policy has asked for another one: the agent reads intervals only
// where the desired state names one. So it first reports what it reads, and sets nothing before the baseline has that.
//
//	controller: desired interval → agent: reports the former one → controller: baseline, on the Node and then in the GPUNode → agent: sets the desired one

// WithFormer returns the desired state of a node with the former intervals of the GPUs for which it names none, from
// their baseline.
func WithFormer(desired, baseline []v1alpha1.DeviceSpec) []v1alpha1.DeviceSpec {
	desired = slices.Clone(desired)
	for i := range desired {
		s := &desired[i].Sharing
		if was := specOf(baseline, desired[i].UUID); was != nil && s.TimeSliceInterval == "" {
			s.TimeSliceInterval = was.Sharing.TimeSliceInterval
		}
	}
	return desired
}

// WithoutIntervals returns the desired state of a node on which another program sets the intervals.
func WithoutIntervals(desired []v1alpha1.DeviceSpec) []v1alpha1.DeviceSpec {
	desired = slices.Clone(desired)
	for i := range desired {
		desired[i].Sharing.TimeSliceInterval = ""
	}
	return desired
}

// WithFound returns the baseline of a node with the intervals of GPUs that it lacks, and ok if there are any.
func WithFound(baseline, desired []v1alpha1.DeviceSpec, have []gpu.Device) (with []v1alpha1.DeviceSpec, ok bool) {
	with = slices.Clone(baseline)
	for i := range with {
		d := slices.IndexFunc(have, func(d gpu.Device) bool { return d.UUID == with[i].UUID })
		if d >= 0 && awaits(desired, with[i]) && Observed(have[d]).TimeSliceInterval != "" {
			with[i].Sharing.TimeSliceInterval, ok = Observed(have[d]).TimeSliceInterval, true
		}
	}
	return with, ok
}

// WithoutUnrecorded returns the desired state of a node without the intervals that must not be set yet, because the
// baseline lacks the former one, and the GPUs that wait for that. A GPU that has no time slice waits for nothing.
func WithoutUnrecorded(desired, baseline []v1alpha1.DeviceSpec, have []gpu.Device) (now []v1alpha1.DeviceSpec, waiting []string) {
	now = slices.Clone(desired)
	for i := range now {
		if slices.ContainsFunc(have, func(d gpu.Device) bool { return d.UUID == now[i].UUID && d.State.TimeSlice == gpu.TimeSliceNone }) {
			continue
		}
		was := specOf(baseline, now[i].UUID)
		if was == nil {
			was = &v1alpha1.DeviceSpec{UUID: now[i].UUID}
		}
		if awaits(desired, *was) {
			now[i].Sharing.TimeSliceInterval = ""
			waiting = append(waiting, now[i].UUID)
		}
	}
	return now, waiting
}

// awaits reports whether the desired state names the interval of a GPU, and its baseline does not.
func awaits(desired []v1alpha1.DeviceSpec, was v1alpha1.DeviceSpec) bool {
	want := specOf(desired, was.UUID)
	return was.Sharing.TimeSliceInterval == "" && want != nil && Timed(want.Sharing)
}

// Timed reports whether the time slice of a GPU matters: the desired state names one, and the GPU is not to be in MIG
// mode.
func Timed(s v1alpha1.DeviceSharing) bool {
	return s.TimeSliceInterval != "" && s.MIGMode == v1alpha1.MIGModeDisabled
}

// timeSliceKnown is the problem of a desired time slice that the driver does not have.
func timeSliceKnown(d gpu.Device, want gpu.State) error {
	if want.MIG || want.TimeSlice == gpu.TimeSliceUnread || d.State.TimeSlice != gpu.TimeSliceNone {
		return nil
	}
	return problem(v1alpha1.ReasonTimeSliceNotSupported, "%s has no time slice to set: nvidia-smi compute-policy --list shows none. Remove "+
		"sharing.timeSlicing.interval, or leave the GPU's node out of the policy", d)
}
