// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// library is the driver's library. The first operation opens it, and the gate says which operations run at the same
// time.
type library struct {
	path string // empty: where the dynamic linker finds it
	lib  nvml.Interface
	gate *gate

	door sync.Mutex // who opens or closes the library
	open bool
}

// newLibrary opens nothing yet.
func newLibrary(path string) *library {
	var options []nvml.LibraryOption
	if path != "" {
		options = append(options, nvml.WithLibraryPath(path))
	}
	return &library{path: path, lib: nvml.New(options...), gate: newGate()}
}

// close gives back every handle. An operation that hangs is not waited for: its handles remain with it.
func (l *library) close() error {
	open, ok := l.gate.shut()
	if !ok {
		return fmt.Errorf("closing NVML: %w: an operation has not returned", gpu.ErrBusy)
	}
	defer open()
	return l.shutdown()
}

// do runs one operation on the open library and returns at its end, or at the end of ctx if that is earlier.
func (l *library) do(ctx context.Context, uuid, what string, operation func() error) error {
	o, err := l.gate.enter(ctx, false, uuid)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return l.carryOut(ctx, o, what, operation)
}

// carryOut runs an operation that the gate has let in.
func (l *library) carryOut(ctx context.Context, o *operation, what string, do func() error) error {
	done := make(chan error, 1)
	go func() {
		err := l.opened(ctx, do)
		if o.leave() { // before the caller is told, who may close
			_ = l.close() // the caller could not, and nobody else may for long; an operation that goes on has a caller of its own
		}
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	case <-ctx.Done():
		o.abandon()
		return fmt.Errorf("%s: NVML has not returned: %w", what, ctx.Err())
	}
}

func (l *library) opened(ctx context.Context, operation func() error) error {
	if err := l.ensureOpen(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil { // opening takes its time
		return err
	}
	return operation()
}

func (l *library) ensureOpen() error {
	l.door.Lock()
	defer l.door.Unlock()
	if l.open {
		return nil
	}
	if err := callError("nvmlInit", l.lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS)); err != nil { // vfio-pci may have all GPUs
		return fmt.Errorf("opening the driver's library %s: %w", l.path, err)
	}
	l.open = true
	return nil
}

func (l *library) shutdown() error {
	l.door.Lock()
	defer l.door.Unlock()
	if !l.open {
		return nil
	}
	l.open = false
	return callError("nvmlShutdown", l.lib.Shutdown())
}

// has reports whether the driver has a call. Calling one that it has not ends the process.
func (l *library) has(symbol string) bool {
	return l.lib.Extensions().LookupSymbol(symbol) == nil
}

// write makes a call that changes the hardware, unless the context has ended and its caller with it.
func write(ctx context.Context, call string, do func() nvml.Return) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return callError(call, do())
}

func (l *library) device(uuid string) (nvml.Device, error) {
	d, ret := l.lib.DeviceGetHandleByUUID(uuid)
	if ret == nvml.ERROR_INVALID_ARGUMENT { // what drivers say of a UUID that they do not know
		ret = nvml.ERROR_NOT_FOUND
	}
	return d, callError("nvmlDeviceGetHandleByUUID", ret)
}

// profileName derives the name of a GPU instance profile as NVIDIA's device plugin and mig-parted do, since the name is
// part of the resource that the plugin advertises: slices, memory in GB, attributes, as in 1g.10gb+me. What the driver
// itself calls a profile may differ. ok is false for a profile number whose attributes are not known here.
func profileName(enum int, info nvml.GpuInstanceProfileInfo, deviceMemory uint64) (name string, ok bool) {
	attributes, ok := profileAttributes(enum)
	if !ok || deviceMemory == 0 {
		return "", false
	}
	return fmt.Sprintf("%dg.%dgb%s", info.SliceCount, memoryGB(info.MemorySizeMB, deviceMemory), attributes), true
}

// memoryGB is the memory of an instance in the unit of profile names: its share of the device, rounded up to eighths,
// of the whole gigabytes of the device, rounded up (go-nvlib, pkg/nvlib/device/mig_profile.go).
func memoryGB(instanceMiB, deviceBytes uint64) int {
	const mib, gib, eighths = 1 << 20, 1 << 30, 8
	share := float64(instanceMiB*mib) / float64(deviceBytes)
	share = math.Ceil(share*eighths) / eighths
	return int(math.Round(share * float64((deviceBytes+gib-1)/gib)))
}

// profileAttributes is the end of the name of a profile, by its NVML_GPU_INSTANCE_PROFILE number.
func profileAttributes(enum int) (attributes string, ok bool) {
	switch enum {
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.GPU_INSTANCE_PROFILE_3_SLICE,
		nvml.GPU_INSTANCE_PROFILE_4_SLICE, nvml.GPU_INSTANCE_PROFILE_6_SLICE, nvml.GPU_INSTANCE_PROFILE_7_SLICE,
		nvml.GPU_INSTANCE_PROFILE_8_SLICE, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2:
		return "", true
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:
		return "+me", true
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME:
		return "+me.all", true
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX,
		nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:
		return "+gfx", true
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:
		return "-me", true
	}
	return "", false
}

// driverName is the name that the driver gives a profile, without the word MIG in front.
func driverName(name [nvml.DEVICE_NAME_V2_BUFFER_SIZE]int8) string {
	var b strings.Builder
	for _, c := range name {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return strings.TrimPrefix(strings.TrimSpace(b.String()), "MIG ")
}
