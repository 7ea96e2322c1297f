// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package plan turns a wish for the GPUs of a node into ordered steps. It is pure: Want reduces the wish for one GPU to
// a gpu.State, Diff compares what is with what is wanted, Node does both for a node. Steps act only through Tools.
//
// The order inside a plan is written once, in Node:
//
//	stop MPS → destroy instances → MIG mode → compute mode → create instances → set MPS limits, start MPS
//
// A plan is recomputed from observation before each run, and each step is idempotent, so a crash anywhere is no case of
// its own.
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
	// Do carries it out.
	Do(ctx context.Context, t Tools) error
}

// Problem is a wish that cannot be met on this hardware; only another wish helps.
type Problem struct {
	Reason  string // one of the constants of the API
	Message string // what, where and what to do next
}

// Error is the message.
func (p *Problem) Error() string { return p.Message }

// Node is the plan for a node. It lists only what differs; an empty plan means that the wish is met. GPUs that wish does
// not list are left as they are. Errors: *Problem.
func Node(wish []v1alpha1.DeviceSpec, have []gpu.Device) ([]Step, error) { panic("not written yet") }

// Blocker is somebody who uses what a step needs to be idle.
type Blocker struct {
	UUID     string // of the GPU
	Instance int    // or gpu.WholeGPU
	Process  *gpu.Process
	Holder   *gpu.Holder
}

// Blockers are all who are in the way of a step, sorted.
func Blockers(s Step, have []gpu.Device) []Blocker { panic("not written yet") }

// Resolve reduces a policy's sharing to the normal form for the selected GPUs of one node, with the exact profile names
// of each GPU. Errors: *Problem.
func Resolve(s v1alpha1.Sharing, selected []gpu.Device) ([]v1alpha1.DeviceSpec, error) {
	panic("not written yet")
}
