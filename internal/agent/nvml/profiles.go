// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// mostProfiles bounds the enumeration; NVML ends it with INVALID_ARGUMENT, at 18 when this was written.
const mostProfiles = 64

type profile struct {
	name string
	info nvml.GpuInstanceProfileInfo
}

// profiles lists the MIG profiles of a GPU by driver id. A driver that describes them in MIG mode only has none to list
// outside of it.
func (r reader) profiles(d nvml.Device) ([]profile, error) {
	memory, ret := d.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return nil, callError("nvmlDeviceGetMemoryInfo", ret)
	}
	var found []profile
	for enum := range mostProfiles {
		info, ret := d.GetGpuInstanceProfileInfo(enum)
		if ret == nvml.ERROR_INVALID_ARGUMENT {
			break
		}
		if ret == nvml.ERROR_NOT_SUPPORTED {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, callError("nvmlDeviceGetGpuInstanceProfileInfo", ret)
		}
		name, ok := profileName(enum, info, memory.Total)
		if !ok {
			name, ok = r.nameByDriver(d, enum)
		}
		if ok && info.InstanceCount > 0 {
			found = append(found, profile{name, info})
		}
	}
	slices.SortFunc(found, func(a, b profile) int { return int(a.info.Id) - int(b.info.Id) })
	return slices.CompactFunc(found, func(a, b profile) bool { return a.info.Id == b.info.Id }), nil
}

func (r reader) nameByDriver(d nvml.Device, enum int) (string, bool) {
	if !r.has("nvmlDeviceGetGpuInstanceProfileInfoV") {
		return "", false
	}
	info, ret := d.GetGpuInstanceProfileInfoV(enum).V2()
	name := driverName(info.Name)
	return name, ret == nvml.SUCCESS && name != ""
}

func (r reader) profile(d nvml.Device, name string) (profile, error) {
	all, err := r.profiles(d)
	if err != nil {
		return profile{}, err
	}
	i := slices.IndexFunc(all, func(p profile) bool { return p.name == name })
	if i < 0 {
		return profile{}, fmt.Errorf("%w: the GPU has no MIG profile %s", gpu.ErrNotSupported, name)
	}
	return all[i], nil
}

// describe adds the placements. ok is false if the driver does not tell them now.
func (p profile) describe(d nvml.Device) (described gpu.Profile, ok bool, err error) {
	placements, ret := d.GetGpuInstancePossiblePlacements(&p.info)
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return gpu.Profile{}, false, nil
	}
	if ret != nvml.SUCCESS {
		return gpu.Profile{}, false, callError("nvmlDeviceGetGpuInstancePossiblePlacements", ret)
	}
	described = gpu.Profile{
		Name: p.name, ID: int(p.info.Id), Slices: int(p.info.SliceCount), Max: int(p.info.InstanceCount),
		MemoryMiB: int64(p.info.MemorySizeMB),
	}
	for _, at := range placements {
		described.Size = int(at.Size)
		described.Starts = append(described.Starts, int(at.Start))
	}
	slices.Sort(described.Starts)
	return described, len(placements) > 0, nil
}
