// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// gpmWindow is the time over which the utilization of MIG instances is measured. The driver's counters are new every
// 100 ms, so NVML asks for more than that between two samples (NVML API reference, nvmlGpmMigSampleGet).
const gpmWindow = 250 * time.Millisecond

// gpmCalls are those of NVML's GPU performance monitoring, which came together.
func gpmCalls() []string {
	return []string{"nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet", "nvmlGpmSampleFree"}
}

// sampleUtilization adds the utilization of MIG instances, on GPUs that count it: Hopper and later. All are measured
// over the same time.
func (s sampler) sampleUtilization(ctx context.Context, handle nvml.Device, instances []gpu.InstanceUse) {
	if len(instances) == 0 || !s.counts(handle) {
		return
	}
	var all []nvml.GpmSample
	defer func() {
		for _, sample := range all {
			_ = s.lib.GpmSampleFree(sample) // it was allocated, so that no error is left
		}
	}()
	alloc := func() (nvml.GpmSample, bool) {
		sample, ret := s.lib.GpmSampleAlloc()
		if ret == nvml.SUCCESS {
			all = append(all, sample)
		}
		return sample, ret == nvml.SUCCESS
	}
	firsts := map[int]nvml.GpmSample{}
	for _, i := range instances {
		if first, ok := alloc(); ok && handle.GpmMigSampleGet(i.ID, first) == nvml.SUCCESS {
			firsts[i.ID] = first
		}
	}
	second, ok := alloc()
	window, cancel := context.WithTimeout(ctx, gpmWindow)
	defer cancel()
	if <-window.Done(); ctx.Err() != nil || !ok {
		return
	}
	for at, i := range instances {
		if first, ok := firsts[i.ID]; ok && handle.GpmMigSampleGet(i.ID, second) == nvml.SUCCESS {
			instances[at].Utilization = s.between(first, second)
		}
	}
}

// counts reports whether a GPU has the counters.
func (s sampler) counts(handle nvml.Device) bool {
	for _, call := range gpmCalls() {
		if !s.has(call) {
			return false
		}
	}
	support, ret := handle.GpmQueryDeviceSupport()
	return ret == nvml.SUCCESS && support.IsSupportedDevice != 0
}

// between is the utilization between two samples; nil if the driver does not know one of its values.
func (s sampler) between(first, second nvml.GpmSample) *gpu.Utilization {
	const asked = 2
	metrics := nvml.GpmMetricsGetType{NumMetrics: asked, Sample1: first, Sample2: second}
	metrics.Metrics[0].MetricId = uint32(nvml.GPM_METRIC_SM_UTIL)
	metrics.Metrics[1].MetricId = uint32(nvml.GPM_METRIC_DRAM_BW_UTIL)
	if s.lib.GpmMetricsGet(&metrics) != nvml.SUCCESS {
		return nil
	}
	for _, m := range metrics.Metrics[:asked] {
		if nvml.Return(m.NvmlReturn) != nvml.SUCCESS || !(m.Value >= 0 && m.Value <= percent) { // not a number is neither
			return nil
		}
	}
	return &gpu.Utilization{Compute: metrics.Metrics[0].Value / percent, Memory: metrics.Metrics[1].Value / percent}
}
