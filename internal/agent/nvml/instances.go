// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// readInstances goes through the GPU instances rather than the MIG devices, since a GPU instance without a compute
// instance, which takes room all the same, is no MIG device.
func readInstances(handle nvml.Device, d *gpu.Device, all []profile) error {
	uuids, err := migDevices(handle)
	if err != nil {
		return err
	}
	for _, p := range all {
		instances, ret := handle.GetGpuInstances(&p.info)
		if ret == nvml.ERROR_NOT_SUPPORTED {
			continue
		}
		if ret != nvml.SUCCESS {
			return callError("nvmlDeviceGetGpuInstances", ret)
		}
		for _, instance := range instances {
			seen, err := readInstance(instance, p, uuids)
			if err != nil {
				return err
			}
			d.State.Instances = append(d.State.Instances, seen)
		}
	}
	slices.SortFunc(d.State.Instances, func(a, b gpu.Instance) int { return a.Placement.Start - b.Placement.Start })
	return nil
}

func readInstance(instance nvml.GpuInstance, p profile, uuids map[migDevice]string) (gpu.Instance, error) {
	info, ret := instance.GetInfo()
	if ret != nvml.SUCCESS {
		return gpu.Instance{}, callError("nvmlGpuInstanceGetInfo", ret)
	}
	computes, err := computeInstances(instance)
	if err != nil {
		return gpu.Instance{}, err
	}
	seen := gpu.Instance{
		Profile: p.name, ID: int(info.Id), Partial: true,
		Placement: gpu.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)},
	}
	if len(computes) == 1 && computes[0].slices == p.info.SliceCount {
		seen.Partial = false
		seen.UUID = uuids[migDevice{seen.ID, computes[0].id}]
	}
	return seen, nil
}

type computeInstance struct {
	handle nvml.ComputeInstance
	id     int
	slices uint32
}

func computeInstances(instance nvml.GpuInstance) ([]computeInstance, error) {
	var found []computeInstance
	for _, profile := range computeProfiles(instance) {
		handles, ret := instance.GetComputeInstances(&profile)
		if ret == nvml.ERROR_NOT_SUPPORTED {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, callError("nvmlGpuInstanceGetComputeInstances", ret)
		}
		for _, handle := range handles {
			info, ret := handle.GetInfo()
			if ret != nvml.SUCCESS {
				return nil, callError("nvmlComputeInstanceGetInfo", ret)
			}
			found = append(found, computeInstance{handle, int(info.Id), profile.SliceCount})
		}
	}
	return found, nil
}

// computeProfiles lists the compute instance profiles of a GPU instance; of those with one driver id, the first.
func computeProfiles(instance nvml.GpuInstance) []nvml.ComputeInstanceProfileInfo {
	var found []nvml.ComputeInstanceProfileInfo
	for enum := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, ret := instance.GetComputeInstanceProfileInfo(enum, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		known := slices.ContainsFunc(found, func(f nvml.ComputeInstanceProfileInfo) bool { return f.Id == info.Id })
		if ret == nvml.SUCCESS && info.InstanceCount > 0 && !known {
			found = append(found, info)
		}
	}
	return found
}

// migDevice names a MIG device within its GPU.
type migDevice struct{ gpuInstance, computeInstance int }

func migDevices(handle nvml.Device) (map[migDevice]string, error) {
	count, ret := handle.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil, callError("nvmlDeviceGetMaxMigDeviceCount", ret)
	}
	uuids := map[migDevice]string{}
	for index := range count {
		device, ret := handle.GetMigDeviceHandleByIndex(index)
		if ret == nvml.ERROR_NOT_FOUND || ret == nvml.ERROR_INVALID_ARGUMENT { // no device at this index
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, callError("nvmlDeviceGetMigDeviceHandleByIndex", ret)
		}
		gi, giRet := device.GetGpuInstanceId()
		ci, ciRet := device.GetComputeInstanceId()
		uuid, uuidRet := device.GetUUID()
		if giRet != nvml.SUCCESS || ciRet != nvml.SUCCESS || uuidRet != nvml.SUCCESS {
			continue // destroyed meanwhile; the next observation has it right
		}
		uuids[migDevice{gi, ci}] = uuid
	}
	return uuids, nil
}

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
