// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// #include "nvml.h"
import "C"

import (
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// none is the instance of a process that uses no instance.
const none = 0xFFFFFFFF

// notAvailable is NVML_VALUE_NOT_AVAILABLE.
const notAvailable = 0xFFFFFFFFFFFFFFFF

// percent is NVML's unit of utilization.
const percent = 100

// computing lists the processes of a GPU, or of one MIG device: those of MPS clients, or all others.
func computing(s *simdriver.State, g *sim.GPU, h *C.struct_handle, throughMPS bool) []C.struct_process {
	var found []C.struct_process
	for _, p := range g.Processes {
		use := g.Use(p)
		if isClient(s, use) != throughMPS || h.kind == C.HANDLE_MIG && p.Instance != int(h.gi) {
			continue
		}
		seen := C.struct_process{pid: C.uint32_t(p.PID), used_memory: notAvailable, gi: none, ci: none}
		if use.MemoryBytes != nil {
			seen.used_memory = C.uint64_t(*use.MemoryBytes)
		}
		if p.Instance != gpu.WholeGPU {
			seen.gi, seen.ci = C.uint32_t(p.Instance), 0
		}
		found = append(found, seen)
	}
	return found
}

// isClient reports whether a process uses its GPU through MPS.
func isClient(s *simdriver.State, use gpu.ProcessUse) bool {
	return use.MPSClient || slices.ContainsFunc(s.MPSClients, func(c simdriver.MPSClient) bool { return c.PID == use.PID })
}

// listProcesses is list, except that NVML tells the length of this list by INSUFFICIENT_SIZE.
func listProcesses[T any](into *T, count *C.uint, found []C.struct_process, item func(p C.struct_process) T) sim.Return {
	if count == nil {
		return sim.InvalidArgument
	}
	if into == nil && len(found) > 0 {
		*count = C.uint(len(found))
		return sim.InsufficientSize
	}
	return list(into, count, len(found), func(i int) T { return item(found[i]) })
}

func processes(name string, h *C.struct_handle, count *C.uint, into *C.struct_process, throughMPS bool) C.int {
	return onGPU(name, h, func(s *simdriver.State, g *sim.GPU) sim.Return {
		return listProcesses(into, count, computing(s, g, h, throughMPS), func(p C.struct_process) C.struct_process { return p })
	})
}

// processesV3 is processes, except that early drivers of branch 535 write structures of 32 bytes, of which callers know
// 24.
func processesV3(name string, h *C.struct_handle, count *C.uint, into *C.struct_process, throughMPS bool) C.int {
	return onGPU(name, h, func(s *simdriver.State, g *sim.GPU) sim.Return {
		found := computing(s, g, h, throughMPS)
		if into == nil || !wideProcesses(s.Node.DriverVersion) {
			return listProcesses(into, count, found, func(p C.struct_process) C.struct_process { return p })
		}
		if len(found) > int(*count) {
			return sim.InsufficientSize
		}
		*count = C.uint(len(found))
		const wide, known = 32, int(unsafe.Sizeof(C.struct_process{}))
		raw := make([]byte, wide*len(found))
		for i := range found {
			copy(raw[i*wide:], unsafe.Slice((*byte)(unsafe.Pointer(&found[i])), known))
		}
		copy(unsafe.Slice((*byte)(unsafe.Pointer(into)), known*len(found)), raw) // no more than there is room for
		return sim.Success
	})
}

// wideProcesses reports whether a driver is from 535.43.02 to 535.86.05.
func wideProcesses(version string) bool {
	var minor, patch int
	n, _ := fmt.Sscanf(version, "535.%d.%d", &minor, &patch)
	return n > 0 && minor >= 43 && (minor < 86 || minor == 86 && patch <= 5)
}

func processesV1(name string, h *C.struct_handle, count *C.uint, into *C.struct_process_v1, throughMPS bool) C.int {
	return onGPU(name, h, func(s *simdriver.State, g *sim.GPU) sim.Return {
		return listProcesses(into, count, computing(s, g, h, throughMPS), func(p C.struct_process) C.struct_process_v1 {
			return C.struct_process_v1{pid: p.pid, used_memory: p.used_memory}
		})
	})
}

//export nvmlDeviceGetComputeRunningProcesses
func nvmlDeviceGetComputeRunningProcesses(h *C.struct_handle, count *C.uint, into *C.struct_process_v1) C.int {
	return processesV1("nvmlDeviceGetComputeRunningProcesses", h, count, into, false)
}

//export nvmlDeviceGetComputeRunningProcesses_v2
func nvmlDeviceGetComputeRunningProcesses_v2(h *C.struct_handle, count *C.uint, into *C.struct_process) C.int {
	return processes("nvmlDeviceGetComputeRunningProcesses", h, count, into, false)
}

//export nvmlDeviceGetComputeRunningProcesses_v3
func nvmlDeviceGetComputeRunningProcesses_v3(h *C.struct_handle, count *C.uint, into *C.struct_process) C.int {
	return processesV3("nvmlDeviceGetComputeRunningProcesses", h, count, into, false)
}

//export nvmlDeviceGetMPSComputeRunningProcesses
func nvmlDeviceGetMPSComputeRunningProcesses(h *C.struct_handle, count *C.uint, into *C.struct_process_v1) C.int {
	return processesV1("nvmlDeviceGetMPSComputeRunningProcesses", h, count, into, true)
}

//export nvmlDeviceGetMPSComputeRunningProcesses_v2
func nvmlDeviceGetMPSComputeRunningProcesses_v2(h *C.struct_handle, count *C.uint, into *C.struct_process) C.int {
	return processes("nvmlDeviceGetMPSComputeRunningProcesses", h, count, into, true)
}

//export nvmlDeviceGetMPSComputeRunningProcesses_v3
func nvmlDeviceGetMPSComputeRunningProcesses_v3(h *C.struct_handle, count *C.uint, into *C.struct_process) C.int {
	return processesV3("nvmlDeviceGetMPSComputeRunningProcesses", h, count, into, true)
}

//export nvmlDeviceGetGraphicsRunningProcesses
func nvmlDeviceGetGraphicsRunningProcesses(h *C.struct_handle, count *C.uint, _ *C.struct_process_v1) C.int {
	return noGraphics(h, count)
}

//export nvmlDeviceGetGraphicsRunningProcesses_v2
func nvmlDeviceGetGraphicsRunningProcesses_v2(h *C.struct_handle, count *C.uint, _ *C.struct_process) C.int {
	return noGraphics(h, count)
}

//export nvmlDeviceGetGraphicsRunningProcesses_v3
func nvmlDeviceGetGraphicsRunningProcesses_v3(h *C.struct_handle, count *C.uint, _ *C.struct_process) C.int {
	return noGraphics(h, count)
}

func noGraphics(h *C.struct_handle, count *C.uint) C.int {
	return onGPU("nvmlDeviceGetGraphicsRunningProcesses", h, func(*simdriver.State, *sim.GPU) sim.Return {
		*count = 0
		return sim.Success
	})
}

//export nvmlDeviceGetUtilizationRates
func nvmlDeviceGetUtilizationRates(h *C.struct_handle, rates *C.struct_utilization) C.int {
	return onGPU("nvmlDeviceGetUtilizationRates", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		u := g.Utilization()
		if u == nil {
			return sim.NotSupported
		}
		*rates = C.struct_utilization{gpu: C.uint(percent * u.Compute), memory: C.uint(percent * u.Memory)}
		return sim.Success
	})
}

// nvmlDeviceGetProcessUtilization lists the processes that did something lately, and behind them, as drivers do, one
// that has ended.
//
//export nvmlDeviceGetProcessUtilization
func nvmlDeviceGetProcessUtilization(h *C.struct_handle, into *C.struct_process_utilization, count *C.uint, _ C.uint64_t) C.int {
	return onGPU("nvmlDeviceGetProcessUtilization", h, func(s *simdriver.State, g *sim.GPU) sim.Return {
		if g.MIG {
			return sim.NotSupported
		}
		now := C.uint64_t(time.Now().UnixMicro())
		var found []C.struct_process_utilization
		for _, p := range g.Processes {
			if use := g.Use(p); use.Utilization != nil && !isClient(s, use) {
				found = append(found, C.struct_process_utilization{
					pid: C.uint32_t(p.PID), timestamp: now,
					sm: C.uint32_t(percent * use.Utilization.Compute), memory: C.uint32_t(percent * use.Utilization.Memory),
				})
			}
		}
		if len(found) == 0 {
			return sim.NotFound
		}
		found = append(found, C.struct_process_utilization{pid: found[0].pid, timestamp: now, sm: 1 << 20, memory: 1 << 20})
		if into == nil {
			*count = C.uint(len(found))
			return sim.InsufficientSize
		}
		return list(into, count, len(found), func(i int) C.struct_process_utilization { return found[i] })
	})
}
