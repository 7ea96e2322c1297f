// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvml is gpu.Hardware on NVIDIA's management library, and the only importer of go-nvml. Profiles, placements
// and names come from the driver of the node, never from a table.
//
// NVML calls may hang in the driver. So each operation runs in a goroutine of its own, one at a time, and its caller
// returns when the context ends: the operation then stops before its next write, and operations that come after it wait
// for it under their own deadline. Handles do not outlive an operation, since a change of MIG mode and a reset make them
// invalid; the library itself stays open until Close, since opening it is slow.
package nvml

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Options say how to reach the hardware.
type Options struct {
	// Library is the path of libnvidia-ml.so.1; see FindLibrary. Empty: where the dynamic linker finds it.
	Library string
	// Reset resets the GPU at a PCI address such as 0000:07:00.0. NVML has no such call; nvidia-smi does it, and only
	// while NVML is closed, which Hardware sees to. What nvidia-smi said belongs into the error.
	Reset func(ctx context.Context, pciBusID string) error
}

// Hardware is gpu.Hardware on NVML.
type Hardware struct {
	options Options
	lib     nvml.Interface
	// turn holds one token: who has it may use the fields below and the library.
	turn chan struct{}
	open bool
}

var _ gpu.Hardware = (*Hardware)(nil)

// New opens nothing yet. Use one Hardware per process: go-nvml binds the process to the first library that it opens.
func New(o Options) *Hardware {
	var library []nvml.LibraryOption
	if o.Library != "" {
		library = append(library, nvml.WithLibraryPath(o.Library))
	}
	return &Hardware{options: o, lib: nvml.New(library...), turn: make(chan struct{}, 1)}
}

// Close gives back every handle. An operation that hangs is not waited for: its handles remain with it.
func (h *Hardware) Close() error {
	select {
	case h.turn <- struct{}{}:
		defer h.release()
		return h.shutdown()
	default:
		return fmt.Errorf("closing NVML: %w: an operation has not returned", gpu.ErrBusy)
	}
}

// do runs one operation on the open library and returns at its end, or at the end of ctx if that is earlier.
func (h *Hardware) do(ctx context.Context, what string, operation func() error) error {
	select {
	case h.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%s: waiting for an earlier NVML operation to return: %w", what, ctx.Err())
	}
	done := make(chan error, 1)
	go func() {
		err := h.opened(ctx, operation)
		h.release() // before the caller is told, who may close
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: NVML has not returned: %w", what, ctx.Err())
	}
}

func (h *Hardware) release() { <-h.turn }

func (h *Hardware) opened(ctx context.Context, operation func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := h.ensureOpen(); err != nil {
		return err
	}
	return operation()
}

func (h *Hardware) ensureOpen() error {
	if h.open {
		return nil
	}
	if err := failed("nvmlInit", h.lib.Init()); err != nil {
		return fmt.Errorf("opening the driver's library %s: %w", h.options.Library, err)
	}
	h.open = true
	return nil
}

func (h *Hardware) shutdown() error {
	if !h.open {
		return nil
	}
	h.open = false
	return failed("nvmlShutdown", h.lib.Shutdown())
}

// has says whether the driver has a call. Calling one that it has not ends the process.
func (h *Hardware) has(symbol string) bool {
	return h.lib.Extensions().LookupSymbol(symbol) == nil
}

// write makes a call that changes the hardware, unless the context has ended and its caller with it.
func write(ctx context.Context, call string, do func() nvml.Return) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return failed(call, do())
}

func (h *Hardware) device(uuid string) (nvml.Device, error) {
	d, ret := h.lib.DeviceGetHandleByUUID(uuid)
	if ret == nvml.ERROR_INVALID_ARGUMENT { // what drivers say of a UUID that they do not know
		ret = nvml.ERROR_NOT_FOUND
	}
	return d, failed("nvmlDeviceGetHandleByUUID", ret)
}
