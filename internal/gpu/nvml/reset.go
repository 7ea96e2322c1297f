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
// reset, so the mode is off meanwhile (NVIDIA/gpu-operator issue 118). Resets of several GPUs run side by side.
func (h *Hardware) Reset(ctx context.Context, uuid string) error {
	what := "resetting GPU " + uuid
	p, err := h.gate.enter(ctx, uuid, true)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return h.carryOut(ctx, p, what, func() error {
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
		err = h.resetClosed(ctx, p, busID(pci))
		if persistent { // also if the reset failed: the mode is not ours
			err = errors.Join(err, h.resumePersistence(uuid))
		}
		return err
	})
}

// resetClosed resets a GPU while NVML is closed. A reset that finds the GPU in use has perhaps met the program that resets
// another one, so it is tried again alone.
func (h *Hardware) resetClosed(ctx context.Context, p *pass, pciBusID string) error {
	gathering, cancel := context.WithTimeout(ctx, h.options.Gather)
	defer cancel()
	<-gathering.Done()
	if err := p.reset(ctx); err != nil {
		return err
	}
	defer p.call(ctx)
	err := h.resetNow(ctx, pciBusID)
	if errors.Is(err, gpu.ErrBusy) && p.met() && p.single(ctx) == nil {
		err = h.resetNow(ctx, pciBusID)
	}
	return err
}

func (h *Hardware) resetNow(ctx context.Context, pciBusID string) error {
	if err := h.shutdown(); err != nil {
		return err
	}
	return resetFailure(h.options.Reset(ctx, pciBusID))
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
