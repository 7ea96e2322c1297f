// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Late is hardware that may not be there yet: on a node whose driver comes in a container, the driver root fills after
// the agent has started. Each call tries to open it until that has succeeded once.
type Late struct {
	open func() (gpu.Hardware, error)

	mu       sync.Mutex
	hardware gpu.Hardware
}

var _ gpu.Hardware = (*Late)(nil)

// NewLate makes hardware of what open will return.
func NewLate(open func() (gpu.Hardware, error)) *Late { return &Late{open: open} }

func (l *Late) opened() (gpu.Hardware, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hardware != nil {
		return l.hardware, nil
	}
	hardware, err := l.open()
	if err != nil {
		return nil, err
	}
	l.hardware = hardware
	return hardware, nil
}

// Observe implements gpu.Hardware.
func (l *Late) Observe(ctx context.Context) (gpu.Inventory, error) {
	h, err := l.opened()
	if err != nil {
		return gpu.Inventory{}, err
	}
	return h.Observe(ctx)
}

// SetMIG implements gpu.Hardware.
func (l *Late) SetMIG(ctx context.Context, uuid string, enabled bool) error {
	return l.do(func(h gpu.Hardware) error { return h.SetMIG(ctx, uuid, enabled) })
}

// Reset implements gpu.Hardware.
func (l *Late) Reset(ctx context.Context, uuids ...string) error {
	return l.do(func(h gpu.Hardware) error { return h.Reset(ctx, uuids...) })
}

// CreateInstance implements gpu.Hardware.
func (l *Late) CreateInstance(ctx context.Context, uuid, profile string, at gpu.Placement) error {
	return l.do(func(h gpu.Hardware) error { return h.CreateInstance(ctx, uuid, profile, at) })
}

// DestroyInstance implements gpu.Hardware.
func (l *Late) DestroyInstance(ctx context.Context, uuid string, id int) error {
	return l.do(func(h gpu.Hardware) error { return h.DestroyInstance(ctx, uuid, id) })
}

// SetComputeMode implements gpu.Hardware.
func (l *Late) SetComputeMode(ctx context.Context, uuid string, mode gpu.ComputeMode) error {
	return l.do(func(h gpu.Hardware) error { return h.SetComputeMode(ctx, uuid, mode) })
}

// Close implements gpu.Hardware. What was never opened needs no closing.
func (l *Late) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hardware == nil {
		return nil
	}
	return l.hardware.Close()
}

func (l *Late) do(operation func(gpu.Hardware) error) error {
	h, err := l.opened()
	if err != nil {
		return err
	}
	return operation(h)
}
