// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// #include "nvml.h"
import "C"

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

//export nvmlDeviceGetCount
func nvmlDeviceGetCount(count *C.uint) C.int { return deviceCount(count) }

//export nvmlDeviceGetCount_v2
func nvmlDeviceGetCount_v2(count *C.uint) C.int { return deviceCount(count) }

func deviceCount(count *C.uint) C.int {
	return call("nvmlDeviceGetCount", nil, func(s *simdriver.State) sim.Return {
		*count = C.uint(len(s.Node.GPUs))
		return sim.Success
	})
}

//export nvmlDeviceGetHandleByIndex
func nvmlDeviceGetHandleByIndex(index C.uint, h **C.struct_handle) C.int { return byIndex(index, h) }

//export nvmlDeviceGetHandleByIndex_v2
func nvmlDeviceGetHandleByIndex_v2(index C.uint, h **C.struct_handle) C.int {
	return byIndex(index, h)
}

func byIndex(index C.uint, h **C.struct_handle) C.int {
	return call("nvmlDeviceGetHandleByIndex", nil, func(s *simdriver.State) sim.Return {
		if int(index) >= len(s.Node.GPUs) {
			return sim.InvalidArgument
		}
		*h = loaded.handle(C.HANDLE_GPU, int(index), 0, 0)
		return sim.Success
	})
}

//export nvmlDeviceGetHandleByUUID
func nvmlDeviceGetHandleByUUID(uuid *C.char, h **C.struct_handle) C.int {
	wanted := C.GoString(uuid)
	return call("nvmlDeviceGetHandleByUUID", nil, func(s *simdriver.State) sim.Return {
		for index, g := range s.Node.GPUs {
			if g.UUID == wanted {
				*h = loaded.handle(C.HANDLE_GPU, index, 0, 0)
				return sim.Success
			}
			for _, m := range migDevices(&g) {
				if m.compute.UUID == wanted {
					*h = loaded.handle(C.HANDLE_MIG, index, m.instance.ID, m.compute.ID)
					return sim.Success
				}
			}
		}
		return sim.NotFound
	})
}

//export nvmlDeviceGetHandleByPciBusId
func nvmlDeviceGetHandleByPciBusId(id *C.char, h **C.struct_handle) C.int { return byBusID(id, h) }

//export nvmlDeviceGetHandleByPciBusId_v2
func nvmlDeviceGetHandleByPciBusId_v2(id *C.char, h **C.struct_handle) C.int { return byBusID(id, h) }

func byBusID(id *C.char, h **C.struct_handle) C.int {
	wanted := strings.ToLower(C.GoString(id))
	return call("nvmlDeviceGetHandleByPciBusId", nil, func(s *simdriver.State) sim.Return {
		i := slices.IndexFunc(s.Node.GPUs, func(g sim.GPU) bool {
			return wanted == g.PCIBusID || wanted == "0000"+g.PCIBusID
		})
		if i < 0 {
			return sim.NotFound
		}
		*h = loaded.handle(C.HANDLE_GPU, i, 0, 0)
		return sim.Success
	})
}

//export nvmlDeviceGetName
func nvmlDeviceGetName(h *C.struct_handle, name *C.char, length C.uint) C.int {
	return onGPU("nvmlDeviceGetName", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		product := g.Spec().Product
		if h.kind == C.HANDLE_MIG {
			m, ok := migDevice(g, h)
			if !ok {
				return sim.NotFound
			}
			product += " MIG " + m.profile.Name
		}
		return fill(name, length, product)
	})
}

//export nvmlDeviceGetUUID
func nvmlDeviceGetUUID(h *C.struct_handle, uuid *C.char, length C.uint) C.int {
	return onGPU("nvmlDeviceGetUUID", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		if h.kind != C.HANDLE_MIG {
			return fill(uuid, length, g.UUID)
		}
		m, ok := migDevice(g, h)
		if !ok {
			return sim.NotFound
		}
		return fill(uuid, length, m.compute.UUID)
	})
}

//export nvmlDeviceGetSerial
func nvmlDeviceGetSerial(h *C.struct_handle, serial *C.char, length C.uint) C.int {
	return onGPU("nvmlDeviceGetSerial", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		return fill(serial, length, "1650"+strings.ToUpper(g.UUID[4:12]))
	})
}

//export nvmlDeviceGetIndex
func nvmlDeviceGetIndex(h *C.struct_handle, index *C.uint) C.int {
	return onGPU("nvmlDeviceGetIndex", h, func(*simdriver.State, *sim.GPU) sim.Return {
		*index = C.uint(h.gpu)
		return sim.Success
	})
}

//export nvmlDeviceGetMinorNumber
func nvmlDeviceGetMinorNumber(h *C.struct_handle, minor *C.uint) C.int {
	return onGPU("nvmlDeviceGetMinorNumber", h, func(*simdriver.State, *sim.GPU) sim.Return {
		if h.kind == C.HANDLE_MIG {
			return sim.NotSupported
		}
		*minor = C.uint(h.gpu)
		return sim.Success
	})
}

//export nvmlDeviceGetPciInfo
func nvmlDeviceGetPciInfo(h *C.struct_handle, pci *C.struct_pci_info) C.int { return pciInfo(h, pci) }

//export nvmlDeviceGetPciInfo_v2
func nvmlDeviceGetPciInfo_v2(h *C.struct_handle, pci *C.struct_pci_info) C.int {
	return pciInfo(h, pci)
}

//export nvmlDeviceGetPciInfo_v3
func nvmlDeviceGetPciInfo_v3(h *C.struct_handle, pci *C.struct_pci_info) C.int {
	return pciInfo(h, pci)
}

func pciInfo(h *C.struct_handle, pci *C.struct_pci_info) C.int {
	return onGPU("nvmlDeviceGetPciInfo", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		var domain, bus, device uint32
		_, err := fmt.Sscanf(g.PCIBusID, "%x:%x:%x", &domain, &bus, &device)
		if err != nil {
			return sim.Unknown
		}
		*pci = C.struct_pci_info{
			domain: C.uint32_t(domain), bus: C.uint32_t(bus), device: C.uint32_t(device),
			pci_device_id: C.uint32_t(g.Spec().PCIDeviceID), pci_subsystem_id: 0x147010DE,
		}
		full := strings.ToUpper("0000" + g.PCIBusID)
		if ret := fill(&pci.bus_id_legacy[0], 16, full[4:]); ret != sim.Success {
			return ret
		}
		return fill(&pci.bus_id[0], 32, full)
	})
}

//export nvmlDeviceGetMemoryInfo
func nvmlDeviceGetMemoryInfo(h *C.struct_handle, memory *C.struct_memory) C.int {
	return onGPU("nvmlDeviceGetMemoryInfo", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		m, ret := memoryOf(g, h)
		*memory = C.struct_memory{total: C.uint64_t(m.Total), used: C.uint64_t(m.Used), free: C.uint64_t(m.Free)}
		return ret
	})
}

//export nvmlDeviceGetMemoryInfo_v2
func nvmlDeviceGetMemoryInfo_v2(h *C.struct_handle, memory *C.struct_memory_v2) C.int {
	return onGPU("nvmlDeviceGetMemoryInfo", h, func(s *simdriver.State, g *sim.GPU) sim.Return {
		if memory.version != version(unsafe.Sizeof(*memory), 2) {
			return versionMismatch
		}
		m, ret := memoryOf(g, h)
		if seen, err := s.Node.MemoryFor(g.UUID, os.Getpid()); err == nil && ret == sim.Success && h.kind == C.HANDLE_GPU {
			m = *seen
		}
		memory.total, memory.used, memory.free = C.uint64_t(m.Total), C.uint64_t(m.Used), C.uint64_t(m.Free)
		memory.reserved = 0
		return ret
	})
}

func memoryOf(g *sim.GPU, h *C.struct_handle) (gpu.Memory, sim.Return) {
	instance := gpu.WholeGPU
	if h.kind == C.HANDLE_MIG {
		if _, ok := migDevice(g, h); !ok {
			return gpu.Memory{}, sim.NotFound
		}
		instance = int(h.gi)
	}
	m := g.Memory(instance)
	if m == nil {
		return gpu.Memory{}, sim.NotSupported
	}
	return *m, sim.Success
}

// version is how NVML marks the version of a structure: above its size.
func version(size uintptr, v uint32) C.uint32_t { return C.uint32_t(size) | C.uint32_t(v)<<24 }

//export nvmlDeviceGetCudaComputeCapability
func nvmlDeviceGetCudaComputeCapability(h *C.struct_handle, major, minor *C.int) C.int {
	return onGPU("nvmlDeviceGetCudaComputeCapability", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		c := g.Spec().ComputeCapability
		*major, *minor = C.int(c.Major), C.int(c.Minor)
		return sim.Success
	})
}

//export nvmlDeviceGetArchitecture
func nvmlDeviceGetArchitecture(h *C.struct_handle, architecture *C.uint) C.int {
	return onGPU("nvmlDeviceGetArchitecture", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		const volta, turing, ampere, ada, hopper, blackwell = 5, 6, 7, 8, 9, 10
		switch c := g.Spec().ComputeCapability; {
		case c.AtLeast(10, 0):
			*architecture = blackwell
		case c.AtLeast(9, 0):
			*architecture = hopper
		case c.AtLeast(8, 9):
			*architecture = ada
		case c.AtLeast(8, 0):
			*architecture = ampere
		case c.AtLeast(7, 5):
			*architecture = turing
		default:
			*architecture = volta
		}
		return sim.Success
	})
}

//export nvmlDeviceGetBrand
func nvmlDeviceGetBrand(h *C.struct_handle, brand *C.uint) C.int {
	return onGPU("nvmlDeviceGetBrand", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		const tesla, nvidia = 2, 14
		*brand = nvidia
		if strings.HasPrefix(g.Spec().Product, "Tesla") {
			*brand = tesla
		}
		return sim.Success
	})
}

//export nvmlDeviceGetVirtualizationMode
func nvmlDeviceGetVirtualizationMode(h *C.struct_handle, mode *C.uint) C.int {
	return onGPU("nvmlDeviceGetVirtualizationMode", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		const none, passthrough, vgpu = 0, 1, 2
		switch {
		case g.Spec().Virtual:
			*mode = vgpu
		case g.NoReset:
			*mode = passthrough
		default:
			*mode = none
		}
		return sim.Success
	})
}

//export nvmlDeviceGetGridLicensableFeatures_v4
func nvmlDeviceGetGridLicensableFeatures_v4(h *C.struct_handle, features *C.struct_licensable_features) C.int {
	return onGPU("nvmlDeviceGetGridLicensableFeatures", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		const vgpu, compute = 1, 4
		*features = C.struct_licensable_features{}
		if !g.Spec().Virtual {
			return sim.Success // which says that there is nothing to license
		}
		features.supported, features.count = 1, 2
		features.features[0].code, features.features[1].code = vgpu, compute
		features.features[1].enabled, features.features[1].state = 1, number(!g.Unlicensed)
		return sim.Success
	})
}

//export nvmlDeviceGetPersistenceMode
func nvmlDeviceGetPersistenceMode(h *C.struct_handle, mode *C.uint) C.int {
	return onGPU("nvmlDeviceGetPersistenceMode", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		d, _ := loaded.current()
		*mode = number(g.Persistence || d.Persistent(g.UUID))
		return sim.Success
	})
}

//export nvmlDeviceSetPersistenceMode
func nvmlDeviceSetPersistenceMode(h *C.struct_handle, mode C.uint) C.int {
	return change("nvmlDeviceSetPersistenceMode", h, func(s *simdriver.State) error {
		g, err := s.Node.GPU(uuidOf(s, h))
		if err == nil {
			g.Persistence = mode == 1
		}
		return err
	})
}

//export nvmlDeviceGetTopologyCommonAncestor
func nvmlDeviceGetTopologyCommonAncestor(a, _ *C.struct_handle, level *C.uint) C.int {
	return onGPU("nvmlDeviceGetTopologyCommonAncestor", a, func(*simdriver.State, *sim.GPU) sim.Return {
		const system = 50
		*level = system
		return sim.Success
	})
}

//export nvmlDeviceGetComputeMode
func nvmlDeviceGetComputeMode(h *C.struct_handle, mode *C.uint) C.int {
	return onGPU("nvmlDeviceGetComputeMode", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		*mode = C.uint(g.ComputeMode)
		return sim.Success
	})
}

//export nvmlDeviceSetComputeMode
func nvmlDeviceSetComputeMode(h *C.struct_handle, mode C.uint) C.int {
	return change("nvmlDeviceSetComputeMode", h, func(s *simdriver.State) error {
		return s.Node.SetComputeMode(uuidOf(s, h), gpu.ComputeMode(mode))
	})
}
