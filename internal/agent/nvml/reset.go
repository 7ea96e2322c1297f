// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

var errNoReset = errors.New("no way to reset a GPU is configured")

// drm is the kernel module that keeps GPUs open for displays (NVIDIA/mig-parted issue 181).
const drm = "nvidia_drm"

// patience is how long a reset waits for a program that has a GPU open and that NVML does not list. NVIDIA's
// node-status-exporter opens every GPU for half a second each minute.
const patience = 70 * time.Second

// resetting is one reset of GPUs that nothing uses, with what was read before the library was closed.
type resetting struct {
	*Hardware

	operation  *operation
	uuids      []string
	pci        []string // their PCI addresses
	persistent []string // UUIDs of those in persistence mode
	ended      bool     // their persistence mode was turned off
}

// Reset implements gpu.Hardware. The driver's own nvidia-smi makes nvidia-persistenced let go of the GPUs meanwhile and
// gives them back to it. Resets of several GPUs run side by side.
func (h *Hardware) Reset(ctx context.Context, uuids ...string) error {
	what := "resetting GPU " + strings.Join(uuids, ", ")
	o, err := h.gate.enter(ctx, true, uuids...)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return h.carryOut(ctx, o, what, func() error {
		if h.options.SMI == nil {
			return fmt.Errorf("%w: %w", gpu.ErrNotSupported, errNoReset)
		}
		r := &resetting{Hardware: h, operation: o, uuids: uuids}
		if err := r.look(); err != nil {
			return err
		}
		err := r.closed(ctx)
		if r.ended { // also if the reset failed: the mode is not ours
			err = errors.Join(err, r.resumePersistence())
		}
		return err
	})
}

// look reads what the reset must know. A process that NVML lists will not go away by waiting.
func (r *resetting) look() error {
	for _, uuid := range r.uuids {
		handle, err := r.device(uuid)
		if err != nil {
			return err
		}
		pci, ret := handle.GetPciInfo()
		if ret != nvml.SUCCESS {
			return callError("nvmlDeviceGetPciInfo", ret)
		}
		r.pci = append(r.pci, busID(pci))
		var d gpu.Device
		if err := r.readProcesses(handle, &d); err != nil {
			return err
		}
		if len(d.Processes) > 0 {
			return fmt.Errorf("%w: process %d uses GPU %s", gpu.ErrBusy, d.Processes[0].PID, busID(pci))
		}
		if mode, ret := handle.GetPersistenceMode(); ret == nvml.SUCCESS && mode == nvml.FEATURE_ENABLED {
			r.persistent = append(r.persistent, uuid)
		}
	}
	return nil
}

// closed resets the GPUs while the library is closed. A reset that finds a GPU in use has perhaps met the program that
// resets another one, so it is tried again alone.
func (r *resetting) closed(ctx context.Context) error {
	gathering, cancel := context.WithTimeout(ctx, r.options.Gather)
	defer cancel()
	<-gathering.Done()
	if err := r.operation.reset(ctx); err != nil {
		return err
	}
	defer r.operation.call(ctx)
	err := r.once(ctx)
	if errors.Is(err, gpu.ErrBusy) && r.operation.met() && r.operation.single(ctx) == nil {
		err = r.once(ctx)
	}
	return r.patiently(ctx, err)
}

// patiently tries again while a program that nobody knows has a GPU open. If nvidia-persistenced could be that program,
// it is told to let go for good after the first attempts.
func (r *resetting) patiently(ctx context.Context, err error) error {
	var waited time.Duration
	for attempt, wait := 1, time.Second; errors.Is(err, gpu.ErrBusy) && waited < patience && r.options.After != nil; attempt++ {
		select {
		case <-r.options.After(wait):
		case <-ctx.Done():
			return errors.Join(r.held(err, waited), ctx.Err())
		}
		waited += wait
		wait = min(2*wait, 10*time.Second)
		if attempt > 1 && !r.ended && len(r.persistent) > 0 {
			r.ended = true
			_, _ = r.options.SMI(ctx, "-i", strings.Join(r.pci, ","), "-pm", "0") // the reset shows what it was good for
		}
		err = r.once(ctx)
	}
	if !errors.Is(err, gpu.ErrBusy) {
		return err
	}
	return r.held(err, waited)
}

// held says of GPUs that nobody known holds what to do. The kernel module nvidia_drm does not let go, so that only a
// reboot activates what is pending.
func (r *resetting) held(err error, waited time.Duration) error {
	if r.options.Module(drm) {
		return fmt.Errorf("%w: %s", &gpu.ModuleError{Module: drm}, firstLine(err))
	}
	return fmt.Errorf("%w for %s, by a program that NVML does not list: find it on the node with fuser -v /dev/nvidia*", err, waited)
}

// once is one run of nvidia-smi.
func (r *resetting) once(ctx context.Context) error {
	if err := r.shutdown(); err != nil {
		return err
	}
	said, err := r.options.SMI(ctx, "--gpu-reset", "-i", strings.Join(r.pci, ","))
	err = resetFailure(said, err, r.pci)
	if peers, ok := errors.AsType[*gpu.PeersError](err); ok {
		r.group.add(r.pci, peers.PCIBusIDs)
	}
	if err == nil && len(r.pci) > 1 {
		r.group.forget()
	}
	return err
}

// resumePersistence turns persistence mode on again in its legacy form: nvidia-persistenced takes no single GPU back.
func (r *resetting) resumePersistence() error {
	if err := r.ensureOpen(); err != nil {
		return err
	}
	var errs []error
	for _, uuid := range r.persistent {
		d, err := r.device(uuid)
		if err == nil {
			err = callError("nvmlDeviceSetPersistenceMode", d.SetPersistenceMode(nvml.FEATURE_ENABLED))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// group is the GPUs of which a reset has said that they must be reset together. Only a reset tells, so it is remembered
// until they were: a fabric manager may run before the next reset.
type group struct {
	mu  sync.Mutex
	pci []string // sorted
}

func (g *group) add(lists ...[]string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pci = append(g.pci, slices.Concat(lists...)...)
	slices.Sort(g.pci)
	g.pci = slices.Compact(g.pci)
}

func (g *group) forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pci = nil
}

// describe says of each GPU which others must be reset with it.
func (g *group) describe(devices []gpu.Device) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range devices {
		if !slices.Contains(g.pci, devices[i].PCIBusID) {
			continue
		}
		for _, other := range devices {
			if other.UUID != devices[i].UUID && slices.Contains(g.pci, other.PCIBusID) {
				devices[i].ResetPeers = append(devices[i].ResetPeers, other.UUID)
			}
		}
	}
}
