// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

const (
	// sampleWindow is how far back the samples of a process's utilization may lie. The driver takes one each second or
	// more often, and keeps them much longer than they are true.
	sampleWindow = 5 * time.Second
	// percent is NVML's unit of utilization.
	percent = 100
)

// Sample implements gpu.Hardware.
func (h *Hardware) Sample(ctx context.Context) (gpu.Sample, error) {
	var (
		sample  gpu.Sample
		partial error
	)
	err := h.do(ctx, everyGPU, "sampling the GPUs", func() error {
		taken, errs, err := sampler{reader: h.reader, now: h.options.Now}.sample(ctx)
		if err == nil && ctx.Err() == nil {
			sample, partial = taken, errs
		}
		return errors.Join(err, ctx.Err())
	})
	if err != nil { // sample is not read: an abandoned operation may still write it
		return gpu.Sample{}, err
	}
	return sample, partial
}

// sampler measures how GPUs are used.
type sampler struct {
	reader

	now func() time.Time // Options.Now
}

// sample measures all GPUs side by side. partial is why some of them are left out.
func (s sampler) sample(ctx context.Context) (sample gpu.Sample, partial, err error) {
	version, ret := s.lib.SystemGetDriverVersion()
	if ret != nvml.SUCCESS {
		return gpu.Sample{}, nil, callError("nvmlSystemGetDriverVersion", ret)
	}
	count, ret := s.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return gpu.Sample{}, nil, callError("nvmlDeviceGetCount", ret)
	}
	devices, errs := make([]gpu.DeviceUse, count), make([]error, count)
	var measuring sync.WaitGroup
	for index := range count {
		measuring.Go(func() {
			if errs[index] = ctx.Err(); errs[index] == nil {
				devices[index], errs[index] = s.sampleDevice(ctx, index, listsOf(version))
			}
		})
	}
	measuring.Wait()
	for index, d := range devices {
		if errs[index] == nil {
			sample.Devices = append(sample.Devices, d)
		} else {
			errs[index] = fmt.Errorf("sampling GPU %d: %w", index, errs[index])
		}
	}
	return sample, errors.Join(errs...), nil
}

func (s sampler) sampleDevice(ctx context.Context, index int, lists lists) (gpu.DeviceUse, error) {
	handle, ret := s.lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return gpu.DeviceUse{}, callError("nvmlDeviceGetHandleByIndex", ret)
	}
	uuid, ret := handle.GetUUID()
	if ret != nvml.SUCCESS {
		return gpu.DeviceUse{}, callError("nvmlDeviceGetUUID", ret)
	}
	d := gpu.DeviceUse{UUID: uuid, Index: index, Minor: -1, Memory: s.memory(handle), ProcessesUnknown: lists == unusable}
	if minor, ret := handle.GetMinorNumber(); ret == nvml.SUCCESS {
		d.Minor = minor
	}
	if rates, ret := handle.GetUtilizationRates(); ret == nvml.SUCCESS {
		d.Utilization = utilization(rates.Gpu, rates.Memory)
	}
	if mode, _, ret := handle.GetMigMode(); ret == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE {
		d.Instances = s.sampleInstances(ctx, handle)
	}
	if d.ProcessesUnknown {
		return d, nil
	}
	processes, err := s.sampleProcesses(handle)
	d.Processes = processes
	return d, err
}

// memory is that of a GPU or a MIG device. The second version of the call tells what the driver reserves from what is
// used.
func (s sampler) memory(handle nvml.Device) *gpu.Memory {
	if s.has("nvmlDeviceGetMemoryInfo_v2") {
		if m, ret := handle.GetMemoryInfo_v2(); ret == nvml.SUCCESS {
			return &gpu.Memory{Total: int64(m.Total), Used: int64(m.Used), Free: int64(m.Free)}
		}
	}
	m, ret := handle.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return nil
	}
	return &gpu.Memory{Total: int64(m.Total), Used: int64(m.Used), Free: int64(m.Free)}
}

// sampleInstances are the MIG devices of a GPU. One that is destroyed meanwhile is left out.
func (s sampler) sampleInstances(ctx context.Context, handle nvml.Device) []gpu.InstanceUse {
	count, ret := handle.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil
	}
	var instances []gpu.InstanceUse
	for index := range count {
		device, ret := handle.GetMigDeviceHandleByIndex(index)
		if ret != nvml.SUCCESS {
			continue
		}
		id, idRet := device.GetGpuInstanceId()
		uuid, uuidRet := device.GetUUID()
		if idRet == nvml.SUCCESS && uuidRet == nvml.SUCCESS {
			profile, start := placeOf(handle, id)
			instances = append(instances, gpu.InstanceUse{ID: id, UUID: uuid, ProfileID: profile, Start: start, Memory: s.memory(device)})
		}
	}
	slices.SortStableFunc(instances, func(a, b gpu.InstanceUse) int { return a.ID - b.ID })
	instances = slices.CompactFunc(instances, func(a, b gpu.InstanceUse) bool { return a.ID == b.ID })
	s.sampleUtilization(ctx, handle, instances)
	return instances
}

// placeOf is the driver's number of the profile of a GPU instance and where the instance begins; -1 if it is destroyed
// meanwhile.
func placeOf(handle nvml.Device, id int) (profile, start int) {
	instance, ret := handle.GetGpuInstanceById(id)
	if ret != nvml.SUCCESS {
		return -1, -1
	}
	info, ret := instance.GetInfo()
	if ret != nvml.SUCCESS {
		return -1, -1
	}
	return int(info.ProfileId), int(info.Placement.Start)
}

// sampleProcesses are the processes of all lists of the driver, each once for each instance.
func (s sampler) sampleProcesses(handle nvml.Device) ([]gpu.ProcessUse, error) {
	type key struct {
		pid      uint32
		instance int
	}
	seen := map[key]gpu.ProcessUse{}
	err := s.eachProcess(handle, func(p nvml.ProcessInfo, throughMPS bool) {
		k := key{p.Pid, instanceOf(p)}
		use := seen[k]
		use.PID, use.Instance, use.MPSClient = int(p.Pid), k.instance, use.MPSClient || throughMPS
		if memory := int64(p.UsedGpuMemory); memory != nvml.VALUE_NOT_AVAILABLE && (use.MemoryBytes == nil || memory > *use.MemoryBytes) {
			use.MemoryBytes = &memory
		}
		seen[k] = use
	})
	if err != nil {
		return nil, err
	}
	rates := s.processUtilization(handle)
	uses := make([]gpu.ProcessUse, 0, len(seen))
	for k, use := range seen {
		if !use.MPSClient && use.Instance == gpu.WholeGPU {
			use.Utilization = rates[k.pid]
		}
		uses = append(uses, use)
	}
	slices.SortFunc(uses, func(a, b gpu.ProcessUse) int { return cmp.Or(a.PID-b.PID, a.Instance-b.Instance) })
	return uses, nil
}

// processUtilization is the last sample of each process that did something lately.
func (s sampler) processUtilization(handle nvml.Device) map[uint32]*gpu.Utilization {
	if !s.has("nvmlDeviceGetProcessUtilization") {
		return nil
	}
	var since uint64
	if s.now != nil {
		since = uint64(s.now().Add(-sampleWindow).UnixMicro())
	}
	samples, ret := handle.GetProcessUtilization(since)
	if ret != nvml.SUCCESS {
		return nil
	}
	latest, rates := map[uint32]uint64{}, map[uint32]*gpu.Utilization{}
	for _, s := range samples {
		if rate := utilization(s.SmUtil, s.MemUtil); rate != nil && s.TimeStamp >= latest[s.Pid] {
			latest[s.Pid], rates[s.Pid] = s.TimeStamp, rate
		}
	}
	return rates
}

// utilization is in NVML's percent. Drivers fill entries of processes that have ended with larger numbers.
func utilization(compute, memory uint32) *gpu.Utilization {
	if compute > percent || memory > percent {
		return nil
	}
	return &gpu.Utilization{Compute: float64(compute) / percent, Memory: float64(memory) / percent}
}

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
