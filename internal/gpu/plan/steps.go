// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// stopMPS stops the daemon of a resource.
type stopMPS struct {
	resource string
	devices  []goal // that it serves
}

func (s stopMPS) String() string {
	return fmt.Sprintf("%s: stop MPS for %s", names(s.devices), s.resource)
}

func (s stopMPS) Device() string { return only(s.devices) }
func (s stopMPS) Needs() Scope   { return NeedsGPU }
func (s stopMPS) Closes() bool   { return false }

func (s stopMPS) Do(ctx context.Context, t Tools) error {
	if err := t.MPS.Stop(ctx, s.resource); err != nil {
		return fmt.Errorf("%s: stopping MPS for %s: %w", names(s.devices), s.resource, err)
	}
	return nil
}

// destroyInstance destroys one MIG instance.
type destroyInstance struct {
	device   gpu.Device
	instance gpu.Instance
}

func (s destroyInstance) String() string {
	return fmt.Sprintf("%s: destroy %s at %s", s.device, s.instance.Profile, s.instance.Placement)
}

func (s destroyInstance) Device() string { return s.device.UUID }
func (s destroyInstance) Needs() Scope   { return NeedsInstance }
func (s destroyInstance) Closes() bool   { return false }

func (s destroyInstance) Do(ctx context.Context, t Tools) error {
	err := t.Hardware.DestroyInstance(ctx, s.device.UUID, s.instance.ID)
	if err != nil && !errors.Is(err, gpu.ErrGone) {
		return fmt.Errorf("%s: destroying %s at %s: %w", s.device, s.instance.Profile, s.instance.Placement, err)
	}
	return nil
}

// setMIG turns MIG mode on or off, with a reset of the GPU where its architecture needs one, and of the GPUs that
// cannot be left out of that reset. They lose their instances, which the next plan makes again.
type setMIG struct {
	device  gpu.Device
	enabled bool
}

func (s setMIG) String() string {
	if s.noted() {
		return fmt.Sprintf("%s: reset, which %ss MIG mode", s.device, s.verb())
	}
	return fmt.Sprintf("%s: %s MIG mode", s.device, s.verb())
}

func (s setMIG) verb() string {
	if s.enabled {
		return "enable"
	}
	return "disable"
}

// noted reports whether the mode is set already and needs the reset only.
func (s setMIG) noted() bool { return s.device.PendingMIG == s.enabled }

func (s setMIG) Device() string { return s.device.UUID }
func (s setMIG) Needs() Scope   { return NeedsGPU }
func (s setMIG) Closes() bool   { return true }

// Do sets the mode and resets the GPU if that is what it takes. Where it takes that and a reset is not supported, which
// leaves a reboot, the error is both gpu.ErrResetRequired and gpu.ErrNotSupported.
func (s setMIG) Do(ctx context.Context, t Tools) error {
	if err := t.unpersist(ctx, s.device); err != nil { // in persistence mode the GPU counts as open
		return err
	}
	err := gpu.ErrResetRequired
	if !s.noted() {
		err = t.Hardware.SetMIG(ctx, s.device.UUID, s.enabled)
	}
	if errors.Is(err, gpu.ErrResetRequired) {
		if failed := t.Hardware.Reset(ctx, GPUs(s)...); failed != nil {
			err = fmt.Errorf("%w: resetting: %w", err, failed)
		} else {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("%s: setting MIG mode to %sd: %w", s.device, s.verb(), err)
	}
	return nil
}

// keepMIG takes back a change of MIG mode that another program asked for and that waits for a reset. Nothing that runs
// notices.
type keepMIG struct{ device gpu.Device }

func (s keepMIG) String() string {
	return fmt.Sprintf("%s: cancel the pending change of MIG mode", s.device)
}

func (s keepMIG) Device() string { return s.device.UUID }
func (s keepMIG) Needs() Scope   { return NeedsNothing }
func (s keepMIG) Closes() bool   { return false }

func (s keepMIG) Do(ctx context.Context, t Tools) error {
	if err := t.Hardware.SetMIG(ctx, s.device.UUID, s.device.State.MIG); err != nil {
		return fmt.Errorf("%s: canceling the pending change of MIG mode: %w", s.device, err)
	}
	return nil
}

// setComputeMode says how many processes may use a GPU without MPS.
type setComputeMode struct {
	device gpu.Device
	mode   gpu.ComputeMode
}

func (s setComputeMode) String() string {
	return fmt.Sprintf("%s: set compute mode %s", s.device, s.mode)
}

func (s setComputeMode) Device() string { return s.device.UUID }
func (s setComputeMode) Needs() Scope   { return NeedsGPU }
func (s setComputeMode) Closes() bool   { return false }

func (s setComputeMode) Do(ctx context.Context, t Tools) error {
	if s.mode != gpu.ComputeDefault {
		if err := t.persist(ctx, s.device); err != nil {
			return err
		}
	}
	if err := t.Hardware.SetComputeMode(ctx, s.device.UUID, s.mode); err != nil {
		return fmt.Errorf("%s: setting compute mode %s: %w", s.device, s.mode, err)
	}
	return nil
}

// setTimeSlice says how long a process keeps a GPU before another one takes its turn.
type setTimeSlice struct {
	device gpu.Device
	slice  gpu.TimeSlice
	early  bool // before MIG mode, which hides it and brings it back when it ends
}

func (s setTimeSlice) String() string {
	return fmt.Sprintf("%s: set time-slice interval %s", s.device, s.slice)
}

func (s setTimeSlice) Device() string { return s.device.UUID }
func (s setTimeSlice) Needs() Scope   { return NeedsNothing }
func (s setTimeSlice) Closes() bool   { return false }

func (s setTimeSlice) Do(ctx context.Context, t Tools) error {
	if err := t.Hardware.SetTimeSlice(ctx, s.device.UUID, s.slice); err != nil {
		return fmt.Errorf("%s: setting time-slice interval %s: %w", s.device, s.slice, err)
	}
	return nil
}

// OnlyComputeMode reports whether nothing but compute modes is left to do.
func OnlyComputeMode(steps []Step) bool {
	other := func(s Step) bool {
		_, sets := s.(setComputeMode)
		return !sets
	}
	return len(steps) > 0 && !slices.ContainsFunc(steps, other)
}

// createInstance creates one MIG instance.
type createInstance struct {
	device   gpu.Device
	instance gpu.Instance
}

func (s createInstance) String() string {
	return fmt.Sprintf("%s: create %s at %s", s.device, s.instance.Profile, s.instance.Placement)
}

func (s createInstance) Device() string { return s.device.UUID }
func (s createInstance) Needs() Scope   { return NeedsNothing }
func (s createInstance) Closes() bool   { return false }

func (s createInstance) Do(ctx context.Context, t Tools) error {
	err := t.Hardware.CreateInstance(ctx, s.device.UUID, s.instance.Profile, s.instance.Placement)
	if err != nil {
		return fmt.Errorf("%s: creating %s at %s: %w", s.device, s.instance.Profile, s.instance.Placement, err)
	}
	return nil
}

// startMPS starts the daemon of a resource, or changes the limits of the one that runs.
type startMPS struct {
	daemon  Daemon
	devices []goal // that it must serve, in the order of daemon.Devices
	runs    bool
}

func (s startMPS) String() string {
	verb := "start MPS"
	if s.runs {
		verb = "limit MPS"
	}
	text := fmt.Sprintf("%s: %s for %s, each client %d%% of the threads and %s",
		names(s.devices), verb, s.daemon.Resource, s.daemon.ActiveThreadPercentage, s.memory())
	if s.daemon.MultiUser {
		text += ", one server for all users"
	}
	return text
}

// memory lists the limits; one that all GPUs have in common once.
func (s startMPS) memory() string {
	limits := make([]string, 0, len(s.daemon.Devices))
	same := true
	for _, d := range s.daemon.Devices {
		limits = append(limits, fmt.Sprintf("%s on GPU %d", memoryLimit(d.PinnedMemoryLimitMiB), d.Index))
		same = same && d.PinnedMemoryLimitMiB == s.daemon.Devices[0].PinnedMemoryLimitMiB
	}
	if same {
		return memoryLimit(s.daemon.Devices[0].PinnedMemoryLimitMiB)
	}
	return format.Join(limits)
}

func memoryLimit(mib int64) string {
	if mib == 0 {
		return "no memory limit"
	}
	return fmt.Sprintf("%d MiB", mib)
}

// fresh are the GPUs that no daemon serves yet and that anybody could use until now.
func (s startMPS) fresh() []goal {
	var fresh []goal
	for _, g := range s.devices {
		if g.device.State.ComputeMode != gpu.ComputeExclusiveProcess && !fleeting(g.device) {
			fresh = append(fresh, g)
		}
	}
	return fresh
}

func (s startMPS) Device() string { return only(s.devices) }

// Needs: the first start needs idle GPUs. Limits are changed for clients to come, and a daemon that died is brought
// back, beside whatever runs: on a GPU in EXCLUSIVE_PROCESS nobody but clients of the daemon can be disturbed, and
// those need it.
func (s startMPS) Needs() Scope {
	if len(s.fresh()) > 0 {
		return NeedsGPU
	}
	return NeedsNothing
}

func (s startMPS) Closes() bool { return false }

func (s startMPS) Do(ctx context.Context, t Tools) error {
	if err := t.MPS.Start(ctx, s.daemon); err != nil {
		return fmt.Errorf("%s: starting MPS for %s: %w", names(s.devices), s.daemon.Resource, err)
	}
	return nil
}

// names lists GPUs, such as "GPU 0 (Tesla-T4) and GPU 1 (Tesla-T4)".
func names(goals []goal) string {
	parts := make([]string, 0, len(goals))
	for _, g := range goals {
		parts = append(parts, g.device.String())
	}
	return format.Join(parts)
}

// only is the UUID of the one GPU; empty if there are several.
func only(goals []goal) string {
	if len(goals) != 1 {
		return ""
	}
	return goals[0].device.UUID
}
