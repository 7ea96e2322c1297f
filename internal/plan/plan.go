// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package plan turns a wish for the GPUs of a node into ordered steps. It is pure: Want reduces the wish for one GPU to
// a gpu.State, Diff compares what is with what is wanted, Node does both for a node. Steps act only through Tools.
//
// The order inside a plan is written twice only, in Node for the node and in Diff for one GPU:
//
//	stop MPS → of each GPU: destroy instances → MIG mode → compute mode → create instances → set MPS limits, start MPS
//
// A plan is recomputed from observation before each run, so a crash anywhere is no case of its own. It may have to be
// recomputed after a run as well, where the hardware shows only then what is left to do: a driver that lists MIG
// profiles in MIG mode only, a compute mode that MIG mode hid. The wish is met when the plan is empty and Same says that
// what is observed is what was wished.
package plan

import (
	"context"
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Scope is what a step needs to be idle.
type Scope int

// The scopes.
const (
	NeedsNothing  Scope = iota // running work is not touched
	NeedsInstance              // nobody may use the instance that is destroyed
	NeedsGPU                   // nobody may use the GPU
)

// MPS starts and stops MPS control daemons.
type MPS interface {
	// Start starts the daemon of a resource, or changes the limits of the one that runs, and returns once it answers.
	Start(ctx context.Context, d Daemon) error
	// Stop stops the daemon of a resource and returns once it is gone.
	Stop(ctx context.Context, resource string) error
}

// Daemon is one MPS control daemon with the GPUs that it serves.
type Daemon struct {
	Resource               string
	ActiveThreadPercentage int
	Devices                []DaemonDevice // by index
}

// DaemonDevice is a GPU that a daemon serves.
type DaemonDevice struct {
	UUID                 string
	Index                int
	PinnedMemoryLimitMiB int64
}

// Tools is what steps act with.
type Tools struct {
	Hardware gpu.Hardware
	MPS      MPS
}

// Step is one change of the hardware or the host. Steps are a closed set; String is what logs, events and
// `kubectl gpusharing plan` print.
type Step interface {
	fmt.Stringer
	// Device is the UUID of the GPU that is changed; empty for a step that concerns several.
	Device() string
	// Needs is what must be idle.
	Needs() Scope
	// Closes says whether NVIDIA's own clients (device plugin, GFD, DCGM) must have closed their handles.
	Closes() bool
	// Do carries it out. Its errors name the GPU and what was attempted.
	Do(ctx context.Context, t Tools) error
}

// Problem is a wish that cannot be met on this hardware; only another wish helps.
type Problem struct {
	Reason  string // one of the constants of the API
	Message string // what, where and what to do next
}

// Error is the message.
func (p *Problem) Error() string { return p.Message }

func problem(reason, format string, args ...any) *Problem {
	return &Problem{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Node is the plan for a node. It lists only what differs. GPUs that wish does not list are left as they are, and so is,
// until it is gone, a GPU that an external MPS daemon serves and that is wished otherwise: an empty plan with Same
// false waits for that. Errors: *Problem.
func Node(wish []v1alpha1.DeviceSpec, have []gpu.Device) ([]Step, error) {
	goals, err := goalsOf(wish, have)
	if err != nil {
		return nil, err
	}
	stops, starts := daemonSteps(goals)
	steps := stops
	for _, g := range goals {
		if g.wished && !g.waits {
			steps = append(steps, Diff(g.device, g.want)...)
		}
	}
	return append(steps, starts...), nil
}
