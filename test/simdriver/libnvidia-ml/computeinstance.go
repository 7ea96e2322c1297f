// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// #include "nvml.h"
import "C"

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// computeSlices are the slices of a compute instance by NVML_COMPUTE_INSTANCE_PROFILE number, which also is its driver
// id; 0 where no GPU that is simulated has the profile.
func computeSlices() []int { return []int{1, 2, 3, 4, 7, 8, 6, 0, 0} }

// hasCompute reports whether a GPU instance of so many slices can hold a compute instance of that many.
func hasCompute(instance, compute int) bool {
	return compute > 0 && (compute == instance || compute < instance && (compute <= 2 || instance == 7))
}

// onComputeProfile serves a call on a GPU instance that names a compute instance profile.
func onComputeProfile(name string, h *C.struct_handle, profile C.uint, do func(i sim.GPUInstance, p sim.Profile, slices int) sim.Return) C.int {
	return onInstance(name, h, func(i sim.GPUInstance, p sim.Profile) sim.Return {
		if int(profile) >= len(computeSlices()) {
			return sim.InvalidArgument
		}
		n := computeSlices()[profile]
		if !hasCompute(p.Slices, n) {
			return sim.NotSupported
		}
		return do(i, p, n)
	})
}

//export nvmlGpuInstanceGetComputeInstanceProfileInfo
func nvmlGpuInstanceGetComputeInstanceProfileInfo(h *C.struct_handle, profile, engine C.uint, info *C.struct_ci_profile) C.int {
	return onComputeProfile("nvmlGpuInstanceGetComputeInstanceProfileInfo", h, profile, func(_ sim.GPUInstance, p sim.Profile, n int) sim.Return {
		if engine != 0 {
			return sim.NotSupported
		}
		*info = C.struct_ci_profile{
			id: profile, slices: C.uint32_t(n), instances: C.uint32_t(p.Slices / n),
			multiprocessors: C.uint32_t(p.Multiprocessors * n / p.Slices), copy_engines: C.uint32_t(p.CopyEngines),
			decoders: C.uint32_t(p.Decoders), encoders: C.uint32_t(p.Encoders), jpegs: C.uint32_t(p.JPEGs), ofas: C.uint32_t(p.OFAs),
		}
		return sim.Success
	})
}

//export nvmlGpuInstanceGetComputeInstanceProfileInfoV
func nvmlGpuInstanceGetComputeInstanceProfileInfoV(h *C.struct_handle, profile, engine C.uint, info *C.struct_ci_profile_v2) C.int {
	return onComputeProfile("nvmlGpuInstanceGetComputeInstanceProfileInfoV", h, profile, func(_ sim.GPUInstance, p sim.Profile, n int) sim.Return {
		if engine != 0 {
			return sim.NotSupported
		}
		if info.version != version(unsafe.Sizeof(*info), 2) {
			return versionMismatch
		}
		*info = C.struct_ci_profile_v2{
			version: info.version, id: profile, slices: C.uint32_t(n), instances: C.uint32_t(p.Slices / n),
			multiprocessors: C.uint32_t(p.Multiprocessors * n / p.Slices), copy_engines: C.uint32_t(p.CopyEngines),
			decoders: C.uint32_t(p.Decoders), encoders: C.uint32_t(p.Encoders), jpegs: C.uint32_t(p.JPEGs), ofas: C.uint32_t(p.OFAs),
		}
		return fill(&info.name[0], 96, computeName(p, n))
	})
}

// computeName is what nvidia-smi calls a compute instance profile.
func computeName(p sim.Profile, slices int) string {
	if slices == p.Slices {
		return "MIG " + p.Name
	}
	return fmt.Sprintf("MIG %dc.%s", slices, p.Name)
}

//export nvmlGpuInstanceGetComputeInstanceRemainingCapacity
func nvmlGpuInstanceGetComputeInstanceRemainingCapacity(h *C.struct_handle, profile C.uint, count *C.uint) C.int {
	return onComputeProfile("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", h, profile, func(i sim.GPUInstance, p sim.Profile, n int) sim.Return {
		free := p.Slices
		for _, c := range i.Compute {
			free -= c.Slices
		}
		*count = C.uint(free / n)
		return sim.Success
	})
}

//export nvmlGpuInstanceGetComputeInstancePossiblePlacements
func nvmlGpuInstanceGetComputeInstancePossiblePlacements(h *C.struct_handle, profile C.uint, into *C.struct_placement, count *C.uint) C.int {
	return onComputeProfile("nvmlGpuInstanceGetComputeInstancePossiblePlacements", h, profile, func(_ sim.GPUInstance, p sim.Profile, n int) sim.Return {
		return list(into, count, p.Slices-n+1, func(i int) C.struct_placement {
			return C.struct_placement{start: C.uint32_t(i), size: C.uint32_t(n)}
		})
	})
}

//export nvmlGpuInstanceCreateComputeInstance
func nvmlGpuInstanceCreateComputeInstance(h *C.struct_handle, profile C.uint, compute **C.struct_handle) C.int {
	return createCompute("nvmlGpuInstanceCreateComputeInstance", h, profile, compute)
}

//export nvmlGpuInstanceCreateComputeInstanceWithPlacement
func nvmlGpuInstanceCreateComputeInstanceWithPlacement(h *C.struct_handle, profile C.uint, _ *C.struct_placement, compute **C.struct_handle) C.int {
	return createCompute("nvmlGpuInstanceCreateComputeInstanceWithPlacement", h, profile, compute)
}

func createCompute(name string, h *C.struct_handle, profile C.uint, compute **C.struct_handle) C.int {
	return change(name, h, func(s *simdriver.State) error {
		if int(profile) >= len(computeSlices()) {
			return &sim.Error{Return: sim.InvalidArgument}
		}
		c, err := s.Node.CreateComputeInstance(uuidOf(s, h), int(h.gi), computeSlices()[profile])
		if err == nil {
			*compute = loaded.handle(C.HANDLE_CI, int(h.gpu), int(h.gi), c.ID)
		}
		return err
	})
}

//export nvmlComputeInstanceDestroy
func nvmlComputeInstanceDestroy(h *C.struct_handle) C.int {
	return change("nvmlComputeInstanceDestroy", h, func(s *simdriver.State) error {
		return s.Node.DestroyComputeInstance(uuidOf(s, h), int(h.gi), int(h.ci))
	})
}

//export nvmlGpuInstanceGetComputeInstances
func nvmlGpuInstanceGetComputeInstances(h *C.struct_handle, profile C.uint, into **C.struct_handle, count *C.uint) C.int {
	return onComputeProfile("nvmlGpuInstanceGetComputeInstances", h, profile, func(i sim.GPUInstance, _ sim.Profile, n int) sim.Return {
		var ids []int
		for _, c := range i.Compute {
			if c.Slices == n {
				ids = append(ids, c.ID)
			}
		}
		return list(into, count, len(ids), func(at int) *C.struct_handle {
			return loaded.handle(C.HANDLE_CI, int(h.gpu), i.ID, ids[at])
		})
	})
}

//export nvmlGpuInstanceGetComputeInstanceById
func nvmlGpuInstanceGetComputeInstanceById(h *C.struct_handle, id C.uint, compute **C.struct_handle) C.int {
	return onInstance("nvmlGpuInstanceGetComputeInstanceById", h, func(i sim.GPUInstance, _ sim.Profile) sim.Return {
		if !slices.ContainsFunc(i.Compute, func(c sim.ComputeInstance) bool { return c.ID == int(id) }) {
			return sim.NotFound
		}
		*compute = loaded.handle(C.HANDLE_CI, int(h.gpu), i.ID, int(id))
		return sim.Success
	})
}

//export nvmlComputeInstanceGetInfo
func nvmlComputeInstanceGetInfo(h *C.struct_handle, info *C.struct_ci_info_v1) C.int {
	var full C.struct_ci_info
	ret := computeInfo(h, &full)
	*info = C.struct_ci_info_v1{device: full.device, gi: full.gi, id: full.id, profile: full.profile}
	return ret
}

//export nvmlComputeInstanceGetInfo_v2
func nvmlComputeInstanceGetInfo_v2(h *C.struct_handle, info *C.struct_ci_info) C.int {
	return computeInfo(h, info)
}

func computeInfo(h *C.struct_handle, info *C.struct_ci_info) C.int {
	return onInstance("nvmlComputeInstanceGetInfo", h, func(i sim.GPUInstance, _ sim.Profile) sim.Return {
		for _, c := range i.Compute {
			if c.ID != int(h.ci) || h.kind != C.HANDLE_CI {
				continue
			}
			*info = C.struct_ci_info{
				device: loaded.handle(C.HANDLE_GPU, int(h.gpu), 0, 0), gi: loaded.handle(C.HANDLE_GI, int(h.gpu), i.ID, 0),
				id: C.uint32_t(c.ID), profile: C.uint32_t(slices.Index(computeSlices(), c.Slices)),
				placement: C.struct_placement{start: C.uint32_t(c.Start), size: C.uint32_t(c.Slices)},
			}
			return sim.Success
		}
		return sim.NotFound
	})
}
