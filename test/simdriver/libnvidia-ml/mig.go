// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// #include "nvml.h"
import "C"

import (
	"os"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

//export nvmlDeviceGetMigMode
func nvmlDeviceGetMigMode(h *C.struct_handle, current, pending *C.uint) C.int {
	return onGPU("nvmlDeviceGetMigMode", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		if !g.Spec().MIGCapable() {
			return sim.NotSupported
		}
		*current, *pending = number(g.MIG), number(g.PendingMIG)
		return sim.Success
	})
}

func number(b bool) C.uint {
	if b {
		return 1
	}
	return 0
}

//export nvmlDeviceSetMigMode
func nvmlDeviceSetMigMode(h *C.struct_handle, mode C.uint, activation *C.int) C.int {
	takes := meeting(meet)
	if hasMode(h, mode == 1) {
		takes = meetFault
	}
	return changeAfter(takes, "nvmlDeviceSetMigMode", h, func(s *simdriver.State) error {
		if _, ok := find(s, h, C.HANDLE_GPU); !ok || mode > 1 {
			return &sim.Error{Return: sim.InvalidArgument}
		}
		status, err := s.Node.SetMIG(uuidOf(s, h), mode == 1, os.Getpid())
		*activation = C.int(status)
		return err
	})
}

// hasMode reports whether a GPU has a MIG mode already, and no other pending.
func hasMode(h *C.struct_handle, enabled bool) bool {
	d, ok := loaded.current()
	if !ok {
		return false
	}
	s, err := d.Read()
	if err != nil {
		return false
	}
	g, ok := find(s, h, C.HANDLE_GPU)
	return ok && g.MIG == enabled && g.PendingMIG == enabled
}

// mig is a MIG device: a compute instance with what it lies in.
type mig struct {
	instance sim.GPUInstance
	compute  sim.ComputeInstance
	profile  sim.Profile
}

// migDevices lists the MIG devices of a GPU in the order of their indexes.
func migDevices(g *sim.GPU) []mig {
	var found []mig
	for _, i := range g.Instances {
		p, _ := g.Profile(i.Profile)
		for _, c := range i.Compute {
			found = append(found, mig{i, c, p})
		}
	}
	return found
}

func migDevice(g *sim.GPU, h *C.struct_handle) (mig, bool) {
	for _, m := range migDevices(g) {
		if m.instance.ID == int(h.gi) && m.compute.ID == int(h.ci) {
			return m, true
		}
	}
	return mig{}, false
}

// onMIG serves a call on the handle of a MIG device.
func onMIG(name string, h *C.struct_handle, do func(m mig) sim.Return) C.int {
	return call(name, h, func(s *simdriver.State) sim.Return {
		g, ok := find(s, h, C.HANDLE_MIG)
		if !ok {
			return sim.InvalidArgument
		}
		m, ok := migDevice(g, h)
		if !ok {
			return sim.NotFound
		}
		return do(m)
	})
}

//export nvmlDeviceIsMigDeviceHandle
func nvmlDeviceIsMigDeviceHandle(h *C.struct_handle, is *C.uint) C.int {
	return onGPU("nvmlDeviceIsMigDeviceHandle", h, func(*simdriver.State, *sim.GPU) sim.Return {
		*is = number(h.kind == C.HANDLE_MIG)
		return sim.Success
	})
}

//export nvmlDeviceGetGpuInstanceId
func nvmlDeviceGetGpuInstanceId(h *C.struct_handle, id *C.uint) C.int {
	return onMIG("nvmlDeviceGetGpuInstanceId", h, func(m mig) sim.Return {
		*id = C.uint(m.instance.ID)
		return sim.Success
	})
}

//export nvmlDeviceGetComputeInstanceId
func nvmlDeviceGetComputeInstanceId(h *C.struct_handle, id *C.uint) C.int {
	return onMIG("nvmlDeviceGetComputeInstanceId", h, func(m mig) sim.Return {
		*id = C.uint(m.compute.ID)
		return sim.Success
	})
}

//export nvmlDeviceGetMaxMigDeviceCount
func nvmlDeviceGetMaxMigDeviceCount(h *C.struct_handle, count *C.uint) C.int {
	return onGPU("nvmlDeviceGetMaxMigDeviceCount", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		*count = 0
		if g.MIG {
			*count = C.uint(g.Spec().ComputeSlices)
		}
		return sim.Success
	})
}

//export nvmlDeviceGetMigDeviceHandleByIndex
func nvmlDeviceGetMigDeviceHandleByIndex(h *C.struct_handle, index C.uint, device **C.struct_handle) C.int {
	return onGPU("nvmlDeviceGetMigDeviceHandleByIndex", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		if !g.MIG {
			return sim.NotSupported
		}
		all := migDevices(g)
		if int(index) >= len(all) {
			return sim.NotFound
		}
		m := all[index]
		*device = loaded.handle(C.HANDLE_MIG, int(h.gpu), m.instance.ID, m.compute.ID)
		return sim.Success
	})
}

//export nvmlDeviceGetDeviceHandleFromMigDeviceHandle
func nvmlDeviceGetDeviceHandleFromMigDeviceHandle(h *C.struct_handle, device **C.struct_handle) C.int {
	return onMIG("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", h, func(mig) sim.Return {
		*device = loaded.handle(C.HANDLE_GPU, int(h.gpu), 0, 0)
		return sim.Success
	})
}

//export nvmlDeviceGetAttributes
func nvmlDeviceGetAttributes(h *C.struct_handle, a *C.struct_attributes) C.int {
	return attributes(h, a)
}

//export nvmlDeviceGetAttributes_v2
func nvmlDeviceGetAttributes_v2(h *C.struct_handle, a *C.struct_attributes) C.int {
	return attributes(h, a)
}

func attributes(h *C.struct_handle, a *C.struct_attributes) C.int {
	return onMIG("nvmlDeviceGetAttributes", h, func(m mig) sim.Return {
		p := m.profile
		*a = C.struct_attributes{
			multiprocessors: C.uint32_t(p.Multiprocessors * m.compute.Slices / p.Slices),
			copy_engines:    C.uint32_t(p.CopyEngines), decoders: C.uint32_t(p.Decoders), encoders: C.uint32_t(p.Encoders),
			jpegs: C.uint32_t(p.JPEGs), ofas: C.uint32_t(p.OFAs),
			gi_slices: C.uint32_t(p.Slices), ci_slices: C.uint32_t(m.compute.Slices), memory_mib: C.uint64_t(p.MemoryMiB),
		}
		return sim.Success
	})
}
