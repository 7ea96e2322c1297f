// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// The calls of drivers from 615 on. go-nvml binds a call when it is made, and ends the process if the library lacks it.
const (
	setMemoryLimits = "nvmlDeviceSetMemoryLimits_v1"
	getMemoryLimits = "nvmlDeviceGetMemoryLimits_v1"
)

// LimitsMemory implements gpu.Hardware. A GPU whose persistence mode the driver does not tell counts as one that keeps
// its limits, as in Observe.
func (h *Hardware) LimitsMemory(ctx context.Context, uuids ...string) (gpu.MemoryLimitSupport, error) {
	var found gpu.MemoryLimitSupport
	err := h.do(ctx, everyGPU, "looking for the driver's memory limits", func() error {
		support := gpu.MemoryLimitSupport{Calls: h.has(setMemoryLimits) && h.has(getMemoryLimits)}
		version, ret := h.lib.SystemGetDriverVersion()
		if err := callError("nvmlSystemGetDriverVersion", ret); err != nil {
			return err
		}
		support.Version = version
		for _, uuid := range uuids {
			d, err := h.device(uuid)
			if errors.Is(err, gpu.ErrGone) {
				continue
			}
			if err != nil {
				return err
			}
			if mode, ret := d.GetPersistenceMode(); ret == nvml.SUCCESS && mode == nvml.FEATURE_DISABLED {
				support.Fleeting = append(support.Fleeting, uuid)
			}
		}
		found = support
		return nil
	})
	if err != nil { // found is not read: an abandoned operation may still write it
		return gpu.MemoryLimitSupport{}, err
	}
	return found, nil
}

// MemoryLimit implements gpu.Hardware.
func (h *Hardware) MemoryLimit(ctx context.Context, uuid, cgroup string) (gpu.MemoryLimit, error) {
	var found gpu.MemoryLimit
	err := h.limited(ctx, uuid, fmt.Sprintf("reading the memory limit of %s on GPU %s", cgroup, uuid), func(d nvml.Device) error {
		got, ret := d.GetMemoryLimits_v1(cgroup)
		if err := limitError(getMemoryLimits, ret); err != nil {
			return err
		}
		found = gpu.MemoryLimit{Soft: got.SoftLimit, Hard: got.HardLimit, Used: got.CurrentUsed}
		return nil
	})
	if err != nil {
		return gpu.MemoryLimit{}, err
	}
	return found, nil
}

// SetMemoryLimit implements gpu.Hardware.
func (h *Hardware) SetMemoryLimit(ctx context.Context, uuid, cgroup string, soft, hard uint64) error {
	return h.limited(ctx, uuid, fmt.Sprintf("setting the memory limit of %s on GPU %s", cgroup, uuid), func(d nvml.Device) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return limitError(setMemoryLimits, d.SetMemoryLimits_v1(cgroup, soft, hard))
	})
}

// limited makes one of the calls, unless the driver lacks it.
func (h *Hardware) limited(ctx context.Context, uuid, what string, call func(nvml.Device) error) error {
	return h.do(ctx, uuid, what, func() error {
		if !h.has(setMemoryLimits) || !h.has(getMemoryLimits) {
			return fmt.Errorf("%w: the driver has no memory limits", gpu.ErrNotSupported)
		}
		d, err := h.device(uuid)
		if err != nil {
			return err
		}
		return call(d)
	})
}

// limitError is the error of one of the calls, for which OPERATING_SYSTEM means a path that cannot be opened.
func limitError(call string, ret nvml.Return) error {
	if ret == nvml.ERROR_OPERATING_SYSTEM {
		return fmt.Errorf("%s: ERROR_OPERATING_SYSTEM: %w", call, gpu.ErrGone)
	}
	return callError(call, ret)
}
