// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// mismatchDeadline is how long the driver's library may be of another version than the kernel module before this
// process counts as ill. A driver upgrade passes through that state in seconds.
const mismatchDeadline = 2 * time.Minute

// errReplaced says that this process must end.
var errReplaced = errors.New("the NVIDIA driver was replaced: the agent starts anew with the new driver's library")

// Source is where LazyHardware gets the hardware from.
type Source struct {
	// Find finds the driver that the node has now.
	Find func() (driver.Driver, error)
	// Open opens the hardware behind a driver that was found.
	Open func(driver.Driver) gpu.Hardware
	// Prepare makes the driver's device nodes usable by this process.
	Prepare func(context.Context, driver.Driver) error
	// Replaced ends this process, which has the library of a driver that is no longer there: a process cannot load
	// another.
	Replaced func()
}

// LazyHardware is hardware whose driver may come after this process, go and be replaced, as that of NVIDIA's driver
// container does. While there is none, nothing of it is open.
type LazyHardware struct {
	source Source
	clock  clock.PassiveClock

	mu         sync.Mutex
	hardware   gpu.Hardware
	identity   driver.Identity
	mismatched time.Time // since when the library is of another version than the kernel module; zero: it is not
}

var _ gpu.Hardware = (*LazyHardware)(nil)

// NewLazyHardware makes hardware of what the source will find.
func NewLazyHardware(source Source, clk clock.PassiveClock) *LazyHardware {
	return &LazyHardware{source: source, clock: clk}
}

// opened is the hardware of the driver that is there now.
func (l *LazyHardware) opened() (gpu.Hardware, driver.Driver, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	found, err := l.source.Find()
	switch {
	case err != nil:
		return nil, found, errors.Join(err, l.close())
	case l.hardware == nil:
		l.hardware, l.identity = l.source.Open(found), found.Identity
	case l.identity != found.Identity:
		l.source.Replaced()
		return nil, found, errors.Join(errReplaced, l.close())
	}
	return l.hardware, found, nil
}

// Observe implements gpu.Hardware.
func (l *LazyHardware) Observe(ctx context.Context) (gpu.Inventory, error) {
	h, found, err := l.opened()
	if err != nil {
		return gpu.Inventory{}, err
	}
	if err := l.source.Prepare(ctx, found); err != nil {
		return gpu.Inventory{}, err
	}
	inventory, err := h.Observe(ctx)
	l.note(errors.Is(err, gpu.ErrDriverMismatch))
	return inventory, err
}

// Sample implements gpu.Hardware.
func (l *LazyHardware) Sample(ctx context.Context) (gpu.Sample, error) {
	h, found, err := l.opened()
	if err != nil {
		return gpu.Sample{}, err
	}
	if err := l.source.Prepare(ctx, found); err != nil {
		return gpu.Sample{}, err
	}
	return h.Sample(ctx)
}

// note remembers since when library and kernel module differ.
func (l *LazyHardware) note(mismatch bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !mismatch:
		l.mismatched = time.Time{}
	case l.mismatched.IsZero():
		l.mismatched = l.clock.Now()
	}
}

// Alive is a liveness check. It fails if library and kernel module have differed for long: a new process loads the
// library anew.
func (l *LazyHardware) Alive(*http.Request) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if since := l.clock.Since(l.mismatched); !l.mismatched.IsZero() && since > mismatchDeadline {
		return fmt.Errorf("%w for %s", gpu.ErrDriverMismatch, since.Round(time.Second))
	}
	return nil
}

// SetMIG implements gpu.Hardware.
func (l *LazyHardware) SetMIG(ctx context.Context, uuid string, enabled bool) error {
	return l.do(func(h gpu.Hardware) error { return h.SetMIG(ctx, uuid, enabled) })
}

// Reset implements gpu.Hardware.
func (l *LazyHardware) Reset(ctx context.Context, uuids ...string) error {
	return l.do(func(h gpu.Hardware) error { return h.Reset(ctx, uuids...) })
}

// CreateInstance implements gpu.Hardware.
func (l *LazyHardware) CreateInstance(ctx context.Context, uuid, profile string, at gpu.Placement) error {
	return l.do(func(h gpu.Hardware) error { return h.CreateInstance(ctx, uuid, profile, at) })
}

// DestroyInstance implements gpu.Hardware.
func (l *LazyHardware) DestroyInstance(ctx context.Context, uuid string, id int) error {
	return l.do(func(h gpu.Hardware) error { return h.DestroyInstance(ctx, uuid, id) })
}

// SetComputeMode implements gpu.Hardware.
func (l *LazyHardware) SetComputeMode(ctx context.Context, uuid string, mode gpu.ComputeMode) error {
	return l.do(func(h gpu.Hardware) error { return h.SetComputeMode(ctx, uuid, mode) })
}

// SetPersistence implements gpu.Hardware.
func (l *LazyHardware) SetPersistence(ctx context.Context, uuid string, on bool) error {
	return l.do(func(h gpu.Hardware) error { return h.SetPersistence(ctx, uuid, on) })
}

// TimeSlices implements gpu.Hardware.
func (l *LazyHardware) TimeSlices(ctx context.Context, uuids ...string) (map[string]gpu.TimeSlice, error) {
	h, _, err := l.opened()
	if err != nil {
		return nil, err
	}
	return h.TimeSlices(ctx, uuids...)
}

// SetTimeSlice implements gpu.Hardware.
func (l *LazyHardware) SetTimeSlice(ctx context.Context, uuid string, slice gpu.TimeSlice) error {
	return l.do(func(h gpu.Hardware) error { return h.SetTimeSlice(ctx, uuid, slice) })
}

// LimitsMemory implements gpu.Hardware.
func (l *LazyHardware) LimitsMemory(ctx context.Context, uuids ...string) (gpu.MemoryLimitSupport, error) {
	h, found, err := l.opened()
	if err != nil {
		return gpu.MemoryLimitSupport{}, err
	}
	if err := l.source.Prepare(ctx, found); err != nil {
		return gpu.MemoryLimitSupport{}, err
	}
	return h.LimitsMemory(ctx, uuids...)
}

// MemoryLimit implements gpu.Hardware.
func (l *LazyHardware) MemoryLimit(ctx context.Context, uuid, cgroup string) (gpu.MemoryLimit, error) {
	h, _, err := l.opened()
	if err != nil {
		return gpu.MemoryLimit{}, err
	}
	return h.MemoryLimit(ctx, uuid, cgroup)
}

// SetMemoryLimit implements gpu.Hardware.
func (l *LazyHardware) SetMemoryLimit(ctx context.Context, uuid, cgroup string, soft, hard uint64) error {
	return l.do(func(h gpu.Hardware) error { return h.SetMemoryLimit(ctx, uuid, cgroup, soft, hard) })
}

// Close implements gpu.Hardware. What was never opened needs no closing.
func (l *LazyHardware) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.close()
}

func (l *LazyHardware) close() error {
	if l.hardware == nil {
		return nil
	}
	return l.hardware.Close()
}

func (l *LazyHardware) do(operation func(gpu.Hardware) error) error {
	h, _, err := l.opened()
	if err != nil {
		return err
	}
	return operation(h)
}
