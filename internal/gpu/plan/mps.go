// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// The resources that whole GPUs are advertised as by NVIDIA's device plugin; the second with renameByDefault.
const (
	ResourceGPU       = "nvidia.com/gpu"
	ResourceGPUShared = "nvidia.com/gpu.shared"
)

// ResourcePrefix begins the extended resources of MIG instances, as NVIDIA's device plugin names them.
const ResourcePrefix = "nvidia.com/mig-"

// ResourceOf is the extended resource of the instances of a profile. NVIDIA's device plugin writes a dot for a plus
// sign, which no name of a resource may have.
func ResourceOf(profile string) string { return ResourcePrefix + strings.ReplaceAll(profile, "+", ".") }

const mebibyte = 1 << 20

// resolveMPS gives each GPU the daemon of the resource, with the limits that NVIDIA's own daemon would set: threads are
// 100 percent and memory the GPU's, both divided by the replicas and rounded down (NVIDIA/k8s-device-plugin,
// cmd/mps-control-daemon/mps/device.go). The daemon is ours; a caller that lets NVIDIA's serve the node says so in
// Owner.
func resolveMPS(s v1alpha1.Sharing, selected []gpu.Device) ([]v1alpha1.DeviceSpec, error) {
	m, specs := *s.MPS, wholeGPUs(selected)
	for i, d := range selected {
		if err := virtual(d); err != nil {
			return nil, err
		}
		if most := MaxClients(d); m.Replicas > most {
			return nil, problem(v1alpha1.ReasonMPSClientLimitExceeded, "%s serves at most %d MPS clients at compute capability %s, and "+
				"sharing.mps.replicas is %d; use %d or fewer, or leave the GPU's node out of the policy",
				d, most, d.ComputeCapability, m.Replicas, most)
		}
		if ptr.Deref(m.MultiUser, false) && !d.ComputeCapability.AtLeast(7, 0) {
			return nil, problem(v1alpha1.ReasonMPSMultiUserNotSupported, "%s has compute capability %s, and sharing.mps.multiUser needs 7.0 "+
				"(Volta) or newer; remove multiUser, or leave the GPU's node out of the policy", d, d.ComputeCapability)
		}
		limit, err := pinnedMemoryLimit(m, d)
		if err != nil {
			return nil, err
		}
		specs[i].Sharing.MPS = &v1alpha1.MPSDaemon{
			ResourceName:           gpuResource(s),
			Owner:                  v1alpha1.MPSDaemonOwnerGPUSharing,
			ActiveThreadPercentage: ptr.Deref(m.ActiveThreadPercentage, 100/m.Replicas),
			PinnedMemoryLimit:      ofMiB(limit),
			MultiUser:              ptr.Deref(m.MultiUser, false),
		}
	}
	return specs, nil
}

// MaxClients is how many clients MPS serves on a GPU. NVIDIA's daemon refuses to start with more replicas
// (NVIDIA/k8s-device-plugin, cmd/mps-control-daemon/mps/device.go: maxClients).
func MaxClients(d gpu.Device) int32 {
	if d.ComputeCapability.AtLeast(7, 5) {
		return 48
	}
	return 16
}

// Renamed reports whether what has replicas is advertised under another name.
func Renamed(s v1alpha1.Sharing) bool {
	return s.Advertise != nil && ptr.Deref(s.Advertise.RenameByDefault, false)
}

// gpuResource is the resource of whole GPUs with replicas.
func gpuResource(s v1alpha1.Sharing) string {
	if Renamed(s) {
		return ResourceGPUShared
	}
	return ResourceGPU
}

// pinnedMemoryLimit is what one client may allocate on a GPU, in MiB. A GPU of unknown memory has no limit of its own.
func pinnedMemoryLimit(m v1alpha1.MPS, d gpu.Device) (int64, error) {
	q := m.PinnedMemoryLimit
	switch {
	case q == nil && d.MemoryMiB == 0:
		return 0, nil
	case q == nil:
		return max(d.MemoryMiB/int64(m.Replicas), 1), nil
	case q.Value() < mebibyte || q.Value()%mebibyte != 0:
		return 0, problem(v1alpha1.ReasonMemoryLimitExceeded,
			"sharing.mps.pinnedMemoryLimit is %s; use a whole number of MiB, such as 512Mi or 4Gi", q)
	}
	if limit := MiB(q); d.MemoryMiB == 0 || limit <= d.MemoryMiB {
		return limit, nil
	}
	return 0, problem(v1alpha1.ReasonMemoryLimitExceeded, "%s has %d MiB of memory, and sharing.mps.pinnedMemoryLimit is %s for one "+
		"client; lower it, or leave it out for the GPU's memory divided by replicas", d, d.MemoryMiB, q)
}

// MiB is a memory limit in MiB; 0 if there is none.
func MiB(limit *resource.Quantity) int64 {
	if limit == nil {
		return 0
	}
	return limit.Value() / mebibyte
}

// ofMiB is a memory limit of so many MiB: none for 0.
func ofMiB(limit int64) *resource.Quantity {
	if limit == 0 {
		return nil
	}
	return resource.NewQuantity(limit*mebibyte, resource.BinarySI)
}
