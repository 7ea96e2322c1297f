// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"
	"math"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// profileName derives the name of a GPU instance profile as NVIDIA's device plugin and mig-parted do, since the name is
// part of the resource that the plugin advertises: slices, memory in GB, attributes, as in 1g.10gb+me. What the driver
// itself calls a profile may differ. ok is false for a profile number whose attributes are not known here.
func profileName(enum int, info nvml.GpuInstanceProfileInfo, deviceMemory uint64) (name string, ok bool) {
	attributes, ok := profileAttributes(enum)
	if !ok || deviceMemory == 0 {
		return "", false
	}
	return fmt.Sprintf("%dg.%dgb%s", info.SliceCount, memoryGB(info.MemorySizeMB, deviceMemory), attributes), true
}

// memoryGB is the memory of an instance in the unit of profile names: its share of the device, rounded up to eighths,
// of the whole gigabytes of the device, rounded up (go-nvlib, pkg/nvlib/device/mig_profile.go).
func memoryGB(instanceMiB, deviceBytes uint64) int {
	const mib, gib, eighths = 1 << 20, 1 << 30, 8
	share := float64(instanceMiB*mib) / float64(deviceBytes)
	share = math.Ceil(share*eighths) / eighths
	return int(math.Round(share * float64((deviceBytes+gib-1)/gib)))
}

// profileAttributes is the end of the name of a profile, by its NVML_GPU_INSTANCE_PROFILE number.
func profileAttributes(enum int) (attributes string, ok bool) {
	switch enum {
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.GPU_INSTANCE_PROFILE_3_SLICE,
		nvml.GPU_INSTANCE_PROFILE_4_SLICE, nvml.GPU_INSTANCE_PROFILE_6_SLICE, nvml.GPU_INSTANCE_PROFILE_7_SLICE,
		nvml.GPU_INSTANCE_PROFILE_8_SLICE, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2:
		return "", true
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:
		return "+me", true
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME:
		return "+me.all", true
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX,
		nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:
		return "+gfx", true
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:
		return "-me", true
	}
	return "", false
}

// driverName is the name that the driver gives a profile, without the word MIG in front.
func driverName(name [nvml.DEVICE_NAME_V2_BUFFER_SIZE]int8) string {
	var b strings.Builder
	for _, c := range name {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return strings.TrimPrefix(strings.TrimSpace(b.String()), "MIG ")
}
