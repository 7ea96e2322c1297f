// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// #include "nvml.h"
import "C"

import (
	"unsafe"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// mostEnums is NVML_GPU_INSTANCE_PROFILE_COUNT.
const mostEnums = 18

// onProfile serves a call on a GPU that names a profile by NVML's enumeration or, with byID, by the driver's id.
func onProfile(name string, h *C.struct_handle, profile C.uint, byID bool, do func(g *sim.GPU, p sim.Profile) sim.Return) C.int {
	return onGPU(name, h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		if h.kind != C.HANDLE_GPU || !byID && profile >= mostEnums {
			return sim.InvalidArgument
		}
		for _, p := range g.Spec().Profiles {
			if byID && p.ID == int(profile) || !byID && p.Enum == int(profile) {
				return do(g, p)
			}
		}
		if byID && g.Spec().MIGCapable() {
			return sim.InvalidArgument
		}
		return sim.NotSupported
	})
}

//export nvmlDeviceGetGpuInstanceProfileInfo
func nvmlDeviceGetGpuInstanceProfileInfo(h *C.struct_handle, profile C.uint, info *C.struct_gi_profile) C.int {
	return onProfile("nvmlDeviceGetGpuInstanceProfileInfo", h, profile, false, func(_ *sim.GPU, p sim.Profile) sim.Return {
		*info = C.struct_gi_profile{
			id: C.uint32_t(p.ID), slices: C.uint32_t(p.Slices), instances: C.uint32_t(p.Max),
			multiprocessors: C.uint32_t(p.Multiprocessors), copy_engines: C.uint32_t(p.CopyEngines),
			decoders: C.uint32_t(p.Decoders), encoders: C.uint32_t(p.Encoders), jpegs: C.uint32_t(p.JPEGs),
			ofas: C.uint32_t(p.OFAs), memory_mib: C.uint64_t(p.MemoryMiB),
		}
		return sim.Success
	})
}

//export nvmlDeviceGetGpuInstanceProfileInfoV
func nvmlDeviceGetGpuInstanceProfileInfoV(h *C.struct_handle, profile C.uint, info *C.struct_gi_profile_v2) C.int {
	return onProfile("nvmlDeviceGetGpuInstanceProfileInfoV", h, profile, false, versionedProfile(info))
}

//export nvmlDeviceGetGpuInstanceProfileInfoByIdV
func nvmlDeviceGetGpuInstanceProfileInfoByIdV(h *C.struct_handle, id C.uint, info *C.struct_gi_profile_v2) C.int {
	return onProfile("nvmlDeviceGetGpuInstanceProfileInfoByIdV", h, id, true, versionedProfile(info))
}

// versionedProfile fills version 2 or 3 of the structure, as the caller has marked it.
func versionedProfile(info *C.struct_gi_profile_v2) func(*sim.GPU, sim.Profile) sim.Return {
	return func(_ *sim.GPU, p sim.Profile) sim.Return {
		var v3 *C.struct_gi_profile_v3
		switch info.version {
		case version(unsafe.Sizeof(*info), 2):
			*info = C.struct_gi_profile_v2{
				version: info.version, id: C.uint32_t(p.ID), slices: C.uint32_t(p.Slices), instances: C.uint32_t(p.Max),
				multiprocessors: C.uint32_t(p.Multiprocessors), copy_engines: C.uint32_t(p.CopyEngines),
				decoders: C.uint32_t(p.Decoders), encoders: C.uint32_t(p.Encoders), jpegs: C.uint32_t(p.JPEGs),
				ofas: C.uint32_t(p.OFAs), memory_mib: C.uint64_t(p.MemoryMiB),
			}
			return fill(&info.name[0], 96, "MIG "+p.Name)
		case version(unsafe.Sizeof(*v3), 3):
			v3 = (*C.struct_gi_profile_v3)(unsafe.Pointer(info))
			*v3 = C.struct_gi_profile_v3{
				version: v3.version, id: C.uint32_t(p.ID), slices: C.uint32_t(p.Slices), instances: C.uint32_t(p.Max),
				multiprocessors: C.uint32_t(p.Multiprocessors), copy_engines: C.uint32_t(p.CopyEngines),
				decoders: C.uint32_t(p.Decoders), encoders: C.uint32_t(p.Encoders), jpegs: C.uint32_t(p.JPEGs),
				ofas: C.uint32_t(p.OFAs), memory_mib: C.uint64_t(p.MemoryMiB),
			}
			return fill(&v3.name[0], 96, "MIG "+p.Name)
		}
		return versionMismatch
	}
}

//export nvmlDeviceGetGpuInstancePossiblePlacements
func nvmlDeviceGetGpuInstancePossiblePlacements(h *C.struct_handle, id C.uint, into *C.struct_placement, count *C.uint) C.int {
	return possiblePlacements(h, id, into, count)
}

//export nvmlDeviceGetGpuInstancePossiblePlacements_v2
func nvmlDeviceGetGpuInstancePossiblePlacements_v2(h *C.struct_handle, id C.uint, into *C.struct_placement, count *C.uint) C.int {
	return possiblePlacements(h, id, into, count)
}

func possiblePlacements(h *C.struct_handle, id C.uint, into *C.struct_placement, count *C.uint) C.int {
	return onProfile("nvmlDeviceGetGpuInstancePossiblePlacements", h, id, true, func(_ *sim.GPU, p sim.Profile) sim.Return {
		return list(into, count, len(p.Starts), func(i int) C.struct_placement {
			return C.struct_placement{start: C.uint32_t(p.Starts[i]), size: C.uint32_t(p.Size)}
		})
	})
}

// list fills an array as NVML does: without an array, or with one that is too small, only the length is told.
func list[T any](into *T, count *C.uint, length int, item func(i int) T) sim.Return {
	if count == nil {
		return sim.InvalidArgument
	}
	room := int(*count)
	*count = C.uint(length)
	if into == nil {
		return sim.Success
	}
	if room < length {
		return sim.InsufficientSize
	}
	array := unsafe.Slice(into, room)
	for i := range length {
		array[i] = item(i)
	}
	return sim.Success
}

//export nvmlDeviceGetGpuInstanceRemainingCapacity
func nvmlDeviceGetGpuInstanceRemainingCapacity(h *C.struct_handle, id C.uint, count *C.uint) C.int {
	return onProfile("nvmlDeviceGetGpuInstanceRemainingCapacity", h, id, true, func(g *sim.GPU, p sim.Profile) sim.Return {
		if !g.MIG {
			return sim.NotSupported
		}
		*count = C.uint(g.RemainingCapacity(p))
		return sim.Success
	})
}

//export nvmlDeviceCreateGpuInstance
func nvmlDeviceCreateGpuInstance(h *C.struct_handle, id C.uint, instance **C.struct_handle) C.int {
	return createGPUInstance("nvmlDeviceCreateGpuInstance", h, id, nil, instance)
}

//export nvmlDeviceCreateGpuInstanceWithPlacement
func nvmlDeviceCreateGpuInstanceWithPlacement(h *C.struct_handle, id C.uint, at *C.struct_placement, instance **C.struct_handle) C.int {
	wanted := gpu.Placement{Start: int(at.start), Size: int(at.size)}
	return createGPUInstance("nvmlDeviceCreateGpuInstanceWithPlacement", h, id, &wanted, instance)
}

func createGPUInstance(name string, h *C.struct_handle, id C.uint, at *gpu.Placement, instance **C.struct_handle) C.int {
	return change(name, h, func(s *simdriver.State) error {
		created, err := s.Node.CreateGPUInstance(uuidOf(s, h), int(id), at)
		if err == nil {
			*instance = loaded.handle(C.HANDLE_GI, int(h.gpu), created.ID, 0)
		}
		return err
	})
}

//export nvmlGpuInstanceDestroy
func nvmlGpuInstanceDestroy(h *C.struct_handle) C.int {
	return change("nvmlGpuInstanceDestroy", h, func(s *simdriver.State) error {
		return s.Node.DestroyGPUInstance(uuidOf(s, h), int(h.gi))
	})
}

//export nvmlDeviceGetGpuInstances
func nvmlDeviceGetGpuInstances(h *C.struct_handle, id C.uint, into **C.struct_handle, count *C.uint) C.int {
	return onProfile("nvmlDeviceGetGpuInstances", h, id, true, func(g *sim.GPU, p sim.Profile) sim.Return {
		if !g.MIG {
			return sim.NotSupported
		}
		var ids []int
		for _, i := range g.Instances {
			if i.Profile == p.ID {
				ids = append(ids, i.ID)
			}
		}
		return list(into, count, len(ids), func(i int) *C.struct_handle {
			return loaded.handle(C.HANDLE_GI, int(h.gpu), ids[i], 0)
		})
	})
}

//export nvmlDeviceGetGpuInstanceById
func nvmlDeviceGetGpuInstanceById(h *C.struct_handle, id C.uint, instance **C.struct_handle) C.int {
	return onGPU("nvmlDeviceGetGpuInstanceById", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		if !g.MIG {
			return sim.NotSupported
		}
		for _, i := range g.Instances {
			if i.ID == int(id) {
				*instance = loaded.handle(C.HANDLE_GI, int(h.gpu), i.ID, 0)
				return sim.Success
			}
		}
		return sim.NotFound
	})
}

// onInstance serves a call on the handle of a GPU instance or of one of its compute instances.
func onInstance(name string, h *C.struct_handle, do func(i sim.GPUInstance, p sim.Profile) sim.Return) C.int {
	return call(name, h, func(s *simdriver.State) sim.Return {
		g, ok := find(s, h, C.HANDLE_GI, C.HANDLE_CI)
		if !ok {
			return sim.InvalidArgument
		}
		for _, i := range g.Instances {
			if i.ID == int(h.gi) {
				p, _ := g.Profile(i.Profile)
				return do(i, p)
			}
		}
		return sim.NotFound
	})
}

//export nvmlGpuInstanceGetInfo
func nvmlGpuInstanceGetInfo(h *C.struct_handle, info *C.struct_gi_info) C.int {
	return onInstance("nvmlGpuInstanceGetInfo", h, func(i sim.GPUInstance, _ sim.Profile) sim.Return {
		*info = C.struct_gi_info{
			device: loaded.handle(C.HANDLE_GPU, int(h.gpu), 0, 0), id: C.uint32_t(i.ID), profile: C.uint32_t(i.Profile),
			placement: C.struct_placement{start: C.uint32_t(i.Placement.Start), size: C.uint32_t(i.Placement.Size)},
		}
		return sim.Success
	})
}
