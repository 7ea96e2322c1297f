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

var errNoReset = errors.New("no way to reset a GPU is configured")

// Reset implements gpu.Hardware. In persistence mode the persistence daemon has the GPU open, which alone forbids the
// reset, so the mode is off meanwhile (NVIDIA/gpu-operator issue 118).
func (h *Hardware) Reset(ctx context.Context, uuid string) error {
	return h.do(ctx, "resetting GPU "+uuid, func() error {
		if h.options.Reset == nil {
			return fmt.Errorf("%w: %w", gpu.ErrNotSupported, errNoReset)
		}
		d, err := h.device(uuid)
		if err != nil {
			return err
		}
		pci, ret := d.GetPciInfo()
		if ret != nvml.SUCCESS {
			return failed("nvmlDeviceGetPciInfo", ret)
		}
		persistent := endPersistence(d)
		err = h.resetClosed(ctx, busID(pci))
		if persistent { // also if the reset failed: the mode is not ours
			err = errors.Join(err, h.resumePersistence(uuid))
		}
		return err
	})
}

// resetClosed resets a GPU while NVML is closed.
func (h *Hardware) resetClosed(ctx context.Context, pciBusID string) error {
	if err := h.shutdown(); err != nil {
		return err
	}
	if err := h.options.Reset(ctx, pciBusID); err != nil {
		return resetFailure(err)
	}
	return nil
}

// endPersistence turns persistence mode off and says whether it was on. If it cannot be turned off, the reset will say so.
func endPersistence(d nvml.Device) bool {
	mode, ret := d.GetPersistenceMode()
	return ret == nvml.SUCCESS && mode == nvml.FEATURE_ENABLED && d.SetPersistenceMode(nvml.FEATURE_DISABLED) == nvml.SUCCESS
}

func (h *Hardware) resumePersistence(uuid string) error {
	if err := h.ensureOpen(); err != nil {
		return err
	}
	d, err := h.device(uuid)
	if err != nil {
		return err
	}
	return failed("nvmlDeviceSetPersistenceMode", d.SetPersistenceMode(nvml.FEATURE_ENABLED))
}
