// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build r615

package main

// #include "nvml.h"
import "C"

import (
	"os"
	"strconv"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

//export nvmlDeviceSetMemoryLimits_v1
func nvmlDeviceSetMemoryLimits_v1(h *C.struct_handle, limits *C.struct_set_limits) C.int {
	ret := change("nvmlDeviceSetMemoryLimits", h, func(s *simdriver.State) error {
		if ret := limitable(s, h, limits != nil); ret != sim.Success {
			return &sim.Error{Return: ret}
		}
		path := C.GoString(limits.cgroup)
		return s.Node.SetMemoryLimit(uuidOf(s, h), path, uint64(limits.soft), uint64(limits.hard), os.Geteuid() == 0)
	})
	if d, ok := loaded.current(); ok && ret == C.int(sim.Success) {
		d.Record("NVML", simdriver.LimitSet, C.GoString(limits.cgroup), strconv.FormatUint(uint64(limits.hard), 10))
	}
	return ret
}

//export nvmlDeviceGetMemoryLimits_v1
func nvmlDeviceGetMemoryLimits_v1(h *C.struct_handle, limits *C.struct_get_limits) C.int {
	return call("nvmlDeviceGetMemoryLimits", h, func(s *simdriver.State) sim.Return {
		if ret := limitable(s, h, limits != nil); ret != sim.Success {
			return ret
		}
		found, err := s.Node.MemoryLimit(uuidOf(s, h), C.GoString(limits.cgroup))
		if err == nil {
			limits.soft, limits.hard, limits.used = C.uint64_t(found.Soft), C.uint64_t(found.Hard), C.uint64_t(found.Used)
		}
		return returned(err)
	})
}

// limitable is what NVML returns of the handle of a GPU, and of one of a MIG instance.
func limitable(s *simdriver.State, h *C.struct_handle, given bool) sim.Return {
	if _, is := find(s, h, C.HANDLE_MIG); is {
		return sim.NotSupported
	}
	if _, is := find(s, h, C.HANDLE_GPU); !is || !given {
		return sim.InvalidArgument
	}
	return sim.Success
}
