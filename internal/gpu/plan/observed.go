// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Observed is how a GPU is shared, in the normal form of the desired state. Partial instances are none: nobody can use
// them, and a plan removes them.
func Observed(d gpu.Device) v1alpha1.DeviceSharing {
	if !d.State.MIG {
		s := v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled, MPS: observedMPS(d)}
		if slices.Contains(gpu.TimeSlices(), d.State.TimeSlice) {
			s.TimeSliceInterval = v1alpha1.TimeSliceInterval(d.State.TimeSlice)
		}
		return s
	}
	count := map[string]int{}
	for _, i := range d.State.Instances {
		if !i.Partial {
			count[i.Profile]++
		}
	}
	return v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: instanceCounts(count)}
}

// observedMPS is the daemon that serves a GPU. One of NVIDIA's whose limits are not known lets a client have all
// threads and the whole memory.
func observedMPS(d gpu.Device) *v1alpha1.MPSDaemon {
	m := d.State.MPS
	if m == nil {
		return nil
	}
	daemon := &v1alpha1.MPSDaemon{
		ResourceName:           m.Resource,
		Owner:                  v1alpha1.MPSDaemonOwnerGPUSharing,
		ActiveThreadPercentage: int32(m.ActiveThreadPercentage),
		PinnedMemoryLimit:      ofMiB(m.PinnedMemoryLimitMiB),
		MultiUser:              m.MultiUser,
	}
	if daemon.ActiveThreadPercentage == 0 {
		daemon.ActiveThreadPercentage = 100
	}
	if m.External {
		daemon.Owner = v1alpha1.MPSDaemonOwnerNVIDIA
		if daemon.PinnedMemoryLimit == nil {
			daemon.PinnedMemoryLimit = ofMiB(d.MemoryMiB)
		}
	}
	return daemon
}

// Met reports whether what is observed of a GPU is its desired state. The time slice counts only where that names one.
func Met(desired, observed v1alpha1.DeviceSharing) bool {
	if !Timed(desired) {
		desired.TimeSliceInterval, observed.TimeSliceInterval = "", ""
	}
	return Same(desired, observed)
}

// Same reports whether two desired states are the same, whatever the order of their instances. The limits of NVIDIA's
// own MPS daemon are not ours to keep, so they do not count.
func Same(a, b v1alpha1.DeviceSharing) bool {
	return a.TimeSliceInterval == b.TimeSliceInterval && a.MIGMode == b.MIGMode && maps.Equal(ByProfile(a.Instances), ByProfile(b.Instances)) && sameMPS(a.MPS, b.MPS)
}

func sameMPS(a, b *v1alpha1.MPSDaemon) bool {
	if a == nil || b == nil {
		return a == b
	}
	if a.Owner == v1alpha1.MPSDaemonOwnerNVIDIA {
		return b.Owner == a.Owner && b.ResourceName == a.ResourceName
	}
	return equality.Semantic.DeepEqual(a, b)
}

// ByProfile counts instances by the names of their profiles.
func ByProfile(instances []v1alpha1.InstanceCount) map[string]int {
	count := map[string]int{}
	for _, i := range instances {
		count[i.Profile] += int(i.Count)
	}
	return count
}

// instanceCounts is the normal form of instances: by profile, none if there are none.
func instanceCounts(count map[string]int) []v1alpha1.InstanceCount {
	var instances []v1alpha1.InstanceCount
	for _, profile := range slices.Sorted(maps.Keys(count)) {
		instances = append(instances, v1alpha1.InstanceCount{
			Profile: profile, Count: int32(count[profile]),
		})
	}
	return instances
}
