// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// #include "nvml.h"
import "C"

import (
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const (
	gpmVersion = 1
	// gpmRefresh is how often the counters are new: two samples must lie further apart.
	gpmRefresh = 100 * time.Millisecond
	// maxSamples is how many samples can be allocated at once, here.
	maxSamples = 1024

	metricSM   = 2
	metricDRAM = 10
)

// gpmSample is a sample of the counters of an instance, or one that is empty.
type gpmSample struct {
	of   string // UUID of the GPU; empty: nothing was sampled
	gi   int
	at   time.Time
	seen gpu.Utilization
}

//export nvmlGpmQueryDeviceSupport
func nvmlGpmQueryDeviceSupport(h *C.struct_handle, support *C.struct_gpm_support) C.int {
	return onGPU("nvmlGpmQueryDeviceSupport", h, func(_ *simdriver.State, g *sim.GPU) sim.Return {
		if support.version != gpmVersion {
			return versionMismatch
		}
		support.supported = number(g.Counts())
		return sim.Success
	})
}

//export nvmlGpmSampleAlloc
func nvmlGpmSampleAlloc(sample **C.struct_handle) C.int {
	return call("nvmlGpmSampleAlloc", nil, func(*simdriver.State) sim.Return {
		id, ok := loaded.newSample()
		if !ok {
			return noMemory
		}
		*sample = loaded.handle(C.HANDLE_GPM, 0, 0, id)
		return sim.Success
	})
}

func (l *library) newSample() (id int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range maxSamples {
		if _, taken := l.samples[id]; !taken {
			l.samples[id] = gpmSample{}
			return id, true
		}
	}
	return 0, false
}

// sample is one that is allocated.
func (l *library) sample(h *C.struct_handle) (gpmSample, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h == nil || h.kind != C.HANDLE_GPM {
		return gpmSample{}, false
	}
	s, ok := l.samples[int(h.ci)]
	return s, ok
}

//export nvmlGpmSampleFree
func nvmlGpmSampleFree(h *C.struct_handle) C.int {
	return call("nvmlGpmSampleFree", nil, func(*simdriver.State) sim.Return {
		if _, ok := loaded.sample(h); !ok {
			return sim.InvalidArgument
		}
		loaded.mu.Lock()
		defer loaded.mu.Unlock()
		delete(loaded.samples, int(h.ci))
		return sim.Success
	})
}

//export nvmlGpmMigSampleGet
func nvmlGpmMigSampleGet(h *C.struct_handle, gi C.uint, into *C.struct_handle) C.int {
	return call("nvmlGpmMigSampleGet", h, func(s *simdriver.State) sim.Return {
		g, ok := find(s, h, C.HANDLE_GPU)
		if _, allocated := loaded.sample(into); !ok || !allocated {
			return sim.InvalidArgument
		}
		seen := g.InstanceUtilization(int(gi))
		switch {
		case !g.MIG || !g.Counts():
			return sim.NotSupported
		case seen == nil:
			return sim.NotFound
		}
		loaded.mu.Lock()
		defer loaded.mu.Unlock()
		loaded.samples[int(into.ci)] = gpmSample{of: g.UUID, gi: int(gi), at: time.Now(), seen: *seen}
		return sim.Success
	})
}

// nvmlGpmMetricsGet compares two samples. It has data only of one instance, between two states of its counters.
//
//export nvmlGpmMetricsGet
func nvmlGpmMetricsGet(m *C.struct_gpm_metrics) C.int {
	return call("nvmlGpmMetricsGet", nil, func(*simdriver.State) sim.Return {
		if m == nil || int(m.count) > len(m.metrics) {
			return sim.InvalidArgument
		}
		if m.version != gpmVersion {
			return versionMismatch
		}
		first, allocated := loaded.sample(m.first)
		second, also := loaded.sample(m.second)
		if !allocated || !also || first.of == "" || first.of != second.of || first.gi != second.gi {
			return sim.InvalidArgument
		}
		for i := range m.metrics[:m.count] {
			metric := &m.metrics[i]
			metric.ret = C.uint32_t(sim.Success)
			switch {
			case second.at.Sub(first.at) <= gpmRefresh:
				metric.ret = C.uint32_t(noData)
			case metric.id == metricSM:
				metric.value = C.double(percent * second.seen.Compute)
			case metric.id == metricDRAM:
				metric.value = C.double(percent * second.seen.Memory)
			default:
				metric.ret = C.uint32_t(sim.NotSupported)
			}
		}
		return sim.Success
	})
}
