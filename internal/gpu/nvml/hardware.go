// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvml is gpu.Hardware on NVIDIA's management library, and the only importer of go-nvml. Profiles, placements
// and names come from the driver of the node, never from a table.
//
// NVML calls may hang in the driver. So each operation runs in a goroutine of its own, and its caller returns when the
// context ends: the operation then stops before its next write, and operations on that GPU, observations and resets that
// come after it wait for it under their own deadline. Operations on different GPUs run side by side (NVML is thread-safe,
// says its API reference). Handles do not outlive an operation, since a change of MIG mode and a reset make them invalid;
// the library itself stays open until Close, since opening it is slow.
package nvml

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Options say how to reach the hardware.
type Options struct {
	// Library is the path of libnvidia-ml.so.1; see driver.Node. Empty: where the dynamic linker finds it.
	Library string
	// SMI runs the driver's nvidia-smi in the driver's own root, where it reaches nvidia-persistenced and the fabric manager,
	// and returns what it printed. NVML has no call for a reset. A reset needs NVML closed, which Hardware sees to.
	SMI func(ctx context.Context, args ...string) (string, error)
	// Gather is how long a reset waits for others that are asked for at the same time, since one that comes later waits
	// until all of them are over. 0: a tenth of a second.
	Gather time.Duration
	// After is the clock by which a reset waits between its attempts. Nil: there is one attempt.
	After func(time.Duration) <-chan time.Time
	// Now is the clock by which samples of a process's utilization are too old. Nil: none is.
	Now func() time.Time
	// Module reports whether a kernel module is loaded. Nil: /proc/modules says so.
	Module func(name string) bool
}

// Hardware is gpu.Hardware on NVML.
type Hardware struct {
	options Options
	lib     nvml.Interface
	gate    *gate
	group   group

	door sync.Mutex // who opens or closes the library
	open bool
}

var _ gpu.Hardware = (*Hardware)(nil)

// New opens nothing yet. Use one Hardware per process: go-nvml binds the process to the first library that it opens.
func New(o Options) *Hardware {
	var library []nvml.LibraryOption
	if o.Library != "" {
		library = append(library, nvml.WithLibraryPath(o.Library))
	}
	if o.Gather == 0 {
		o.Gather = 100 * time.Millisecond
	}
	if o.Module == nil {
		o.Module = moduleLoaded
	}
	return &Hardware{options: o, lib: nvml.New(library...), gate: newGate()}
}

// moduleLoaded reads the kernel's list of modules, which every container sees.
func moduleLoaded(name string) bool {
	modules, err := os.ReadFile("/proc/modules")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(modules)) {
		if strings.HasPrefix(line, name+" ") {
			return true
		}
	}
	return false
}

// Close gives back every handle. An operation that hangs is not waited for: its handles remain with it.
func (h *Hardware) Close() error {
	open, ok := h.gate.shut()
	if !ok {
		return fmt.Errorf("closing NVML: %w: an operation has not returned", gpu.ErrBusy)
	}
	defer open()
	return h.shutdown()
}

// do runs one operation on the open library and returns at its end, or at the end of ctx if that is earlier.
func (h *Hardware) do(ctx context.Context, uuid, what string, operation func() error) error {
	p, err := h.gate.enter(ctx, false, uuid)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return h.carryOut(ctx, p, what, operation)
}

// carryOut runs an operation that the gate has let in.
func (h *Hardware) carryOut(ctx context.Context, p *pass, what string, operation func() error) error {
	done := make(chan error, 1)
	go func() {
		err := h.opened(ctx, operation)
		p.leave() // before the caller is told, who may close
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	case <-ctx.Done():
		p.abandon()
		return fmt.Errorf("%s: NVML has not returned: %w", what, ctx.Err())
	}
}

func (h *Hardware) opened(ctx context.Context, operation func() error) error {
	if err := h.ensureOpen(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil { // opening takes its time
		return err
	}
	return operation()
}

func (h *Hardware) ensureOpen() error {
	h.door.Lock()
	defer h.door.Unlock()
	if h.open {
		return nil
	}
	if err := failed("nvmlInit", h.lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS)); err != nil { // vfio-pci may have all GPUs
		return fmt.Errorf("opening the driver's library %s: %w", h.options.Library, err)
	}
	h.open = true
	return nil
}

func (h *Hardware) shutdown() error {
	h.door.Lock()
	defer h.door.Unlock()
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
