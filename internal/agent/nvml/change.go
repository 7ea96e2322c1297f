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

// SetMIG implements gpu.Hardware. NVML notes a mode that it cannot activate as pending and says so in a status of its
// own.
func (h *Hardware) SetMIG(ctx context.Context, uuid string, enabled bool) error {
	mode := nvml.DEVICE_MIG_DISABLE
	if enabled {
		mode = nvml.DEVICE_MIG_ENABLE
	}
	return h.do(ctx, uuid, fmt.Sprintf("setting MIG mode %t on GPU %s", enabled, uuid), func() error {
		d, err := h.device(uuid)
		if err != nil {
			return err
		}
		var activation nvml.Return
		err = write(ctx, "nvmlDeviceSetMigMode", func() (ret nvml.Return) {
			activation, ret = d.SetMigMode(mode)
			return ret
		})
		if err != nil {
			return err
		}
		if activation != nvml.SUCCESS {
			name, _ := describe(activation)
			return fmt.Errorf("%w: the mode is pending, activating it gave %s", gpu.ErrResetRequired, name)
		}
		return nil
	})
}

// SetComputeMode implements gpu.Hardware. A mode that the GPU has already is not set again: in MIG mode NVML refuses
// even that.
func (h *Hardware) SetComputeMode(ctx context.Context, uuid string, mode gpu.ComputeMode) error {
	return h.do(ctx, uuid, fmt.Sprintf("setting compute mode %s on GPU %s", mode, uuid), func() error {
		d, err := h.device(uuid)
		if err != nil {
			return err
		}
		if have, ret := d.GetComputeMode(); ret == nvml.SUCCESS && have == nvml.ComputeMode(mode) {
			return nil
		}
		return write(ctx, "nvmlDeviceSetComputeMode", func() nvml.Return { return d.SetComputeMode(nvml.ComputeMode(mode)) })
	})
}

// SetPersistence implements gpu.Hardware. It does not reach nvidia-persistenced.
func (h *Hardware) SetPersistence(ctx context.Context, uuid string, on bool) error {
	mode := nvml.FEATURE_DISABLED
	if on {
		mode = nvml.FEATURE_ENABLED
	}
	return h.do(ctx, uuid, fmt.Sprintf("setting persistence mode %t on GPU %s", on, uuid), func() error {
		d, err := h.device(uuid)
		if err != nil {
			return err
		}
		const call = "nvmlDeviceSetPersistenceMode"
		if !h.has(call) {
			return fmt.Errorf("%w: the driver has no %s", gpu.ErrNotSupported, call)
		}
		return write(ctx, call, func() nvml.Return { return d.SetPersistenceMode(mode) })
	})
}

// CreateInstance implements gpu.Hardware.
func (h *Hardware) CreateInstance(ctx context.Context, uuid, profile string, at gpu.Placement) error {
	return h.do(ctx, uuid, fmt.Sprintf("creating %s at %s on GPU %s", profile, at, uuid), func() error {
		d, err := h.device(uuid)
		if err != nil {
			return err
		}
		p, err := h.profile(d, profile)
		if err != nil {
			return err
		}
		placement := nvml.GpuInstancePlacement{Start: uint32(at.Start), Size: uint32(at.Size)}
		var instance nvml.GpuInstance
		err = write(ctx, "nvmlDeviceCreateGpuInstanceWithPlacement", func() (ret nvml.Return) {
			instance, ret = d.CreateGpuInstanceWithPlacement(&p.info, &placement)
			return ret
		})
		if err != nil {
			return err
		}
		if err := span(ctx, instance, p.info.SliceCount); err != nil { // half an instance helps nobody, also after ctx
			return errors.Join(err, callError("taking the GPU instance back: nvmlGpuInstanceDestroy", instance.Destroy()))
		}
		return nil
	})
}

// span creates the compute instance that has all slices of a GPU instance.
func span(ctx context.Context, instance nvml.GpuInstance, slices uint32) error {
	for _, info := range computeProfiles(instance) {
		if info.SliceCount == slices {
			return write(ctx, "nvmlGpuInstanceCreateComputeInstance", func() nvml.Return {
				_, ret := instance.CreateComputeInstance(&info)
				return ret
			})
		}
	}
	return fmt.Errorf("%w: the driver has no compute instance profile of %d slices", gpu.ErrNotSupported, slices)
}

// DestroyInstance implements gpu.Hardware.
func (h *Hardware) DestroyInstance(ctx context.Context, uuid string, id int) error {
	return h.do(ctx, uuid, fmt.Sprintf("destroying instance %d on GPU %s", id, uuid), func() error {
		d, err := h.device(uuid)
		if err != nil {
			return err
		}
		instance, ret := d.GetGpuInstanceById(id)
		if ret != nvml.SUCCESS {
			return callError("nvmlDeviceGetGpuInstanceById", ret)
		}
		computes, err := computeInstances(instance)
		if err != nil {
			return err
		}
		for _, c := range computes {
			if err := write(ctx, "nvmlComputeInstanceDestroy", c.handle.Destroy); err != nil {
				return err
			}
		}
		return write(ctx, "nvmlGpuInstanceDestroy", instance.Destroy)
	})
}
