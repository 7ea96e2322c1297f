// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// #include "nvml.h"
import "C"

import (
	"unsafe"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// cudaVersion is 13.0, as CUDA packs it.
const cudaVersion = 13000

// noGPUs is the flag with which the initialisation does not fail for want of GPUs.
const noGPUs = 1

//export nvmlInit
func nvmlInit() C.int { return initialise(0) }

//export nvmlInit_v2
func nvmlInit_v2() C.int { return initialise(0) }

//export nvmlInitWithFlags
func nvmlInitWithFlags(flags C.uint) C.int { return initialise(flags) }

func initialise(flags C.uint) C.int {
	if ret := loaded.open(); ret != sim.Success {
		return C.int(ret)
	}
	ret := call("nvmlInit", nil, func(s *simdriver.State) sim.Return {
		if len(s.Node.GPUs) == 0 && flags&noGPUs == 0 {
			return sim.NotFound
		}
		return sim.Success
	})
	if ret != 0 {
		loaded.shut()
	}
	return ret
}

//export nvmlShutdown
func nvmlShutdown() C.int { return C.int(loaded.shut()) }

//export nvmlSystemGetDriverVersion
func nvmlSystemGetDriverVersion(version *C.char, length C.uint) C.int {
	return call("nvmlSystemGetDriverVersion", nil, func(s *simdriver.State) sim.Return {
		return fill(version, length, s.Node.DriverVersion)
	})
}

//export nvmlSystemGetNVMLVersion
func nvmlSystemGetNVMLVersion(version *C.char, length C.uint) C.int {
	return call("nvmlSystemGetNVMLVersion", nil, func(s *simdriver.State) sim.Return {
		return fill(version, length, "13."+s.Node.DriverVersion)
	})
}

//export nvmlSystemGetCudaDriverVersion
func nvmlSystemGetCudaDriverVersion(version *C.int) C.int { return setCUDA(version) }

//export nvmlSystemGetCudaDriverVersion_v2
func nvmlSystemGetCudaDriverVersion_v2(version *C.int) C.int { return setCUDA(version) }

func setCUDA(version *C.int) C.int {
	return call("nvmlSystemGetCudaDriverVersion", nil, func(*simdriver.State) sim.Return {
		*version = cudaVersion
		return sim.Success
	})
}

// nvmlSystemGetProcessName is there for programs of other versions. Ours does not call it: NVIDIA's reads /proc/<pid>/cmdline, and a
// process that keeps the lock of its memory keeps the caller waiting for ever.
//
//export nvmlSystemGetProcessName
func nvmlSystemGetProcessName(pid C.uint, name *C.char, length C.uint) C.int {
	return call("nvmlSystemGetProcessName", nil, func(s *simdriver.State) sim.Return {
		for _, g := range s.Node.GPUs {
			for _, p := range g.Processes {
				if p.PID == int(pid) && p.Name != "" {
					return fill(name, length, p.Name)
				}
			}
		}
		return sim.NotFound
	})
}

// fill writes a C string into a buffer.
func fill(buffer *C.char, length C.uint, text string) sim.Return {
	if buffer == nil {
		return sim.InvalidArgument
	}
	if len(text) >= int(length) {
		return sim.InsufficientSize
	}
	into := unsafe.Slice((*byte)(unsafe.Pointer(buffer)), int(length))
	copy(into, text)
	into[len(text)] = 0
	return sim.Success
}
