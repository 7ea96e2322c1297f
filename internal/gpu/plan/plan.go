// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package plan turns a desired state for the GPUs of a node into ordered steps. It is pure: Want reduces the desired
// state for one GPU to a gpu.State, Diff compares what is with what is wanted, Node does both for a node. Steps act
// only through Tools.
//
// The order inside a plan is written twice only, in Node for the node and in Diff for one GPU:
//
//	stop MPS → of each GPU: destroy instances → time slice, if MIG mode comes → MIG mode → compute mode → time slice → create instances → set MPS limits, start MPS
//
// A plan is recomputed from observation before each run, so a crash anywhere is no case of its own. It may have to be
// recomputed after a run as well, where the hardware shows only then what is left to do: a driver that lists MIG
// profiles in MIG mode only, a compute mode that MIG mode hid. The desired state is met when the plan is empty and Same
// says that the observed state is the desired state.
package plan

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
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
	// New limits are for clients that connect later.
	Start(ctx context.Context, d Daemon) error
	// Stop stops the daemon of a resource and returns once it is gone.
	Stop(ctx context.Context, resource string) error
}

// Daemon is one MPS control daemon with the GPUs that it serves.
type Daemon struct {
	Resource               string
	MultiUser              bool `json:",omitempty"` // one server for the clients of all users
	ActiveThreadPercentage int
	Devices                []DaemonDevice // by index
}

// DaemonDevice is a GPU that a daemon serves.
type DaemonDevice struct {
	UUID                 string
	Index                int
	PinnedMemoryLimitMiB int64 // 0: no limit
}

// Persistence keeps GPUs initialized while no program has them open, so that their compute mode lasts.
type Persistence interface {
	// TurnOn begins it for a GPU. One on which it cannot be turned on is no error: the plan goes on without.
	TurnOn(ctx context.Context, uuid string) error
	// Restore takes back what TurnOn has changed, if anything.
	Restore(ctx context.Context, uuid string) error
}

// Tools is what steps act with.
type Tools struct {
	Hardware    gpu.Hardware
	MPS         MPS
	Persistence Persistence // nil: nothing is turned on
}

func (t Tools) persist(ctx context.Context, d gpu.Device) error {
	if t.Persistence == nil || d.Persistence != gpu.PersistenceOff {
		return nil
	}
	if err := t.Persistence.TurnOn(ctx, d.UUID); err != nil {
		return fmt.Errorf("%s: turning persistence mode on, so that the compute mode lasts: %w", d, err)
	}
	return nil
}

func (t Tools) unpersist(ctx context.Context, d gpu.Device) error {
	if t.Persistence == nil {
		return nil
	}
	if err := t.Persistence.Restore(ctx, d.UUID); err != nil {
		return fmt.Errorf("%s: turning persistence mode off again: %w", d, err)
	}
	return nil
}

// Step is one change of the hardware or the host. Steps are a closed set; String is what logs, events and
// `kubectl gpusharing plan` print.
type Step interface {
	fmt.Stringer
	// Device is the UUID of the GPU that is changed; empty for a step that concerns several.
	Device() string
	// Needs is what must be idle.
	Needs() Scope
	// Closes reports whether NVIDIA's own clients (device plugin, GFD, DCGM) must have closed their handles.
	Closes() bool
	// Do carries it out. Its errors name the GPU and what was attempted.
	Do(ctx context.Context, t Tools) error
}

// Problem is a desired state that cannot be met on this hardware; only another desired state helps.
type Problem struct {
	Reason  string // one of the constants of the API
	Message string // what, where and what to do next
}

// Error is the message.
func (p *Problem) Error() string { return p.Message }

// joined is one problem of several: the reason of the first, what each says. None is nil.
func joined(problems []error) error {
	switch len(problems) {
	case 0:
		return nil
	case 1:
		return problems[0]
	}
	all := &Problem{}
	said := make([]string, 0, len(problems))
	for _, err := range problems {
		if p, is := errors.AsType[*Problem](err); is && all.Reason == "" {
			all.Reason = p.Reason
		}
		said = append(said, err.Error())
	}
	all.Message = strings.Join(said, "; ")
	return all
}

func problem(reason, format string, args ...any) *Problem {
	return &Problem{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Node is the plan for a node. It lists only what differs. GPUs that desired does not list are left as they are, and so
// is, until it is gone, a GPU that an external MPS daemon serves and that is desired otherwise: an empty plan with Same
// false waits for that. Errors: *Problem. A GPU that cannot be as desired is left as it is too, and does not keep the
// others from their steps: those come with the problem. If the node does not have a GPU of the desired state there are
// none.
func Node(desired []v1alpha1.DeviceSpec, have []gpu.Device) ([]Step, error) {
	goals, err := goalsOf(desired, have)
	return stepsTo(goals), err
}

// Back is the plan that makes GPUs what they were before, with their instances at the same placements. GPUs of have
// that before does not list are left as they are.
func Back(before, have []gpu.Device) []Step {
	goals := make([]goal, 0, len(have))
	for _, d := range have {
		g := goal{device: d, want: d.State}
		for _, was := range before {
			if was.UUID == d.UUID {
				g.want, g.desired = was.State, true
				g.want.Instances = slices.DeleteFunc(slices.Clone(was.State.Instances), partial)
			}
		}
		goals = append(goals, g)
	}
	arrange(goals)
	return stepsTo(goals)
}

func partial(i gpu.Instance) bool { return i.Partial }

// stepsTo are the steps that reach all goals of a node.
func stepsTo(goals []goal) []Step {
	stops, starts := daemonSteps(goals)
	steps := stops
	for _, g := range goals {
		if g.desired && !g.waits {
			steps = append(steps, Diff(g.device, g.want)...)
		}
	}
	return append(steps, starts...)
}

// GPUs are the UUIDs of all GPUs that a step concerns, in the order of their indexes. When a step cannot be carried
// out, the later steps of these GPUs cannot either.
func GPUs(s Step) []string {
	switch s := s.(type) {
	case stopMPS:
		return uuids(s.devices)
	case startMPS:
		return uuids(s.devices)
	case setMIG:
		return append([]string{s.device.UUID}, s.device.ResetPeers...)
	}
	return []string{s.Device()}
}

func uuids(goals []goal) []string {
	list := make([]string, 0, len(goals))
	for _, g := range goals {
		list = append(list, g.device.UUID)
	}
	return list
}

// describe says in a message which instances a GPU would get.
func describe(s v1alpha1.DeviceSharing) string {
	if len(s.Instances) == 0 {
		return "none"
	}
	parts := make([]string, 0, len(s.Instances))
	for _, i := range s.Instances {
		parts = append(parts, fmt.Sprintf("%d × %s", i.Count, i.Profile))
	}
	return strings.Join(parts, " + ")
}

// devices lists GPUs in a message.
func devices(list []gpu.Device) string {
	parts := make([]string, 0, len(list))
	for _, d := range list {
		parts = append(parts, d.String())
	}
	return format.Join(parts)
}

// ChangesMIG reports whether a step changes the MIG mode of a GPU or its instances. Where NVIDIA's mig-manager
// partitions the GPUs, those steps are its to make, in its own way.
func ChangesMIG(s Step) bool {
	switch s.(type) {
	case destroyInstance, createInstance, setMIG, keepMIG:
		return true
	}
	return false
}

// OnlyInstances reports whether steps only destroy and create instances.
func OnlyInstances(steps []Step) bool {
	return !slices.ContainsFunc(steps, func(s Step) bool {
		switch s.(type) {
		case destroyInstance, createInstance:
			return false
		}
		return true
	})
}

// WithoutMIG are the other steps of a plan.
func WithoutMIG(steps []Step) []Step { return slices.DeleteFunc(slices.Clone(steps), ChangesMIG) }
