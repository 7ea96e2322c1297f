// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvml is gpu.Hardware on NVIDIA's management library, and the only importer of go-nvml. Profiles, placements
// and names come from the driver of the node, never from a table.
//
// NVML calls may hang in the driver. So each operation runs in a goroutine of its own, and its caller returns when the
// context ends: the operation then stops before its next write, and operations on that GPU, observations and resets
// that come after it wait for it under their own deadline. Operations on different GPUs run side by side (NVML is
// thread-safe, says its API reference). Handles do not outlive an operation, since a change of MIG mode and a reset
// make them invalid; the library itself stays open until Close, since opening it is slow.
package nvml

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Options say how to reach the hardware.
type Options struct {
	// Library is the path of libnvidia-ml.so.1; see driver.Node. Empty: where the dynamic linker finds it.
	Library string
	// SMI runs the driver's nvidia-smi in the driver's own root, where it reaches nvidia-persistenced and the fabric
	// manager, and returns what it printed. NVML has no call for a reset. A reset needs NVML closed, which Hardware
	// sees to.
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
//
//	Hardware  what may be done: observe.go, sample.go, change.go, reset.go
//	reader    what NVML tells of one GPU, for an observation, a change or a reset
//	sampler   what is measured of one GPU
//	library   the driver's library, which one operation after the other finds open, and the gate before it
type Hardware struct {
	reader

	options Options
	group   group
}

var _ gpu.Hardware = (*Hardware)(nil)

// New opens nothing yet. Use one Hardware per process: go-nvml binds the process to the first library that it opens.
func New(o Options) *Hardware {
	if o.Gather == 0 {
		o.Gather = 100 * time.Millisecond
	}
	if o.Module == nil {
		o.Module = moduleLoaded
	}
	return &Hardware{reader: reader{newLibrary(o.Library)}, options: o}
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

// Close implements gpu.Hardware: it gives back every handle. An operation that hangs is not waited for: its handles
// remain with it.
func (h *Hardware) Close() error { return h.close() }
