// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// observation is one look at the node, complete or not at all: who decides on half of it destroys what is in use.
type observation struct {
	driverVersion string
	daemons       []v1alpha1.MPSStatus
	devices       []gpu.Device
	at            time.Time
}

// observationError says why there is no observation.
type observationError struct {
	reason string // one of the constants of the API
	err    error
}

func (e *observationError) Error() string { return e.err.Error() }
func (e *observationError) Unwrap() error { return e.err }

func notObserved(reason, what string, err error) error {
	return &observationError{reason: reason, err: fmt.Errorf("%s: %w", what, err)}
}

// notRead says why the GPUs could not be read.
func notRead(err error) error {
	if none, is := errors.AsType[*driver.Missing](err); is {
		return &observationError{reason: missingReason(none.State), err: err}
	}
	if errors.Is(err, gpu.ErrDriverMismatch) {
		return &observationError{reason: v1alpha1.ReasonDriverMismatch, err: fmt.Errorf(
			"the driver's library is of another version than the loaded kernel module: wait for the driver upgrade, or reboot the node: %w", err)}
	}
	return notObserved(v1alpha1.ReasonNVMLFailed, "reading the GPUs through NVML", err)
}

func missingReason(s driver.State) string {
	switch s {
	case driver.NotReady:
		return v1alpha1.ReasonDriverNotReady
	case driver.Unsupported:
		return v1alpha1.ReasonPlatformNotSupported
	case driver.NotFound:
	}
	return v1alpha1.ReasonDriverNotFound
}

// observer looks at the node.
type observer struct {
	tools

	admin  []string                  // ResourceClaims whose containers hold nothing
	timed  []string                  // UUIDs of the GPUs whose time slice is read, those for which the spec names one
	before map[string][]gpu.Instance // by UUID, as last reported
}

// of is the observer of what a GPUNode is about.
func (o observer) of(node *v1alpha1.GPUNode) observer {
	o.admin, o.timed, o.before = node.Spec.AdminClaims, nil, map[string][]gpu.Instance{}
	for _, d := range plan.Devices(node.Status.Devices) {
		o.before[d.UUID] = d.State.Instances
	}
	for _, d := range node.Spec.Devices {
		if plan.Timed(d.Sharing) {
			o.timed = append(o.timed, d.UUID)
		}
	}
	return o
}

// observe looks at the GPUs, at the MPS daemons that serve them and at who uses them.
func (o observer) observe(ctx context.Context) (observation, error) {
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	at := o.clock.Now()
	inventory, err := o.hardware.Observe(ctx)
	if err != nil {
		return observation{}, notRead(err)
	}
	if err := o.readTimeSlices(ctx, inventory.Devices); err != nil {
		return observation{}, notRead(err)
	}
	serving, err := o.mps.Observe(ctx)
	if err != nil {
		return observation{}, notObserved(v1alpha1.ReasonMPSDaemonFailed, "looking for MPS control daemons", err)
	}
	if err := o.markUnsupported(inventory.Devices); err != nil {
		return observation{}, notObserved(v1alpha1.ReasonMPSDaemonFailed, "looking for what cannot be held", err)
	}
	allocations, err := o.allocations.List(ctx)
	if err != nil {
		return observation{}, notObserved(v1alpha1.ReasonPodResourcesFailed, "reading the kubelet's pod resources", err)
	}
	allocations = withoutAdmin(allocations, o.admin)
	devices := mps.Assign(inventory.Devices, serving)
	for i := range devices {
		devices[i].Before = o.before[devices[i].UUID]
		devices[i].Processes = o.described(devices[i].Processes)
		devices[i].Holders = append(slices.Clone(devices[i].Holders), holdersOf(devices[i], allocations)...)
		slices.SortStableFunc(devices[i].Holders, byPod)
		devices[i].Holders = slices.Compact(devices[i].Holders)
	}
	return observation{driverVersion: inventory.DriverVersion, daemons: mpsStatus(serving), devices: devices, at: at}, nil
}

// readTimeSlices adds the time slices that matter. A GPU in MIG mode has none.
func (o observer) readTimeSlices(ctx context.Context, devices []gpu.Device) error {
	var uuids []string
	for _, d := range devices {
		if !d.State.MIG && slices.Contains(o.timed, d.UUID) {
			uuids = append(uuids, d.UUID)
		}
	}
	if len(uuids) == 0 {
		return nil
	}
	read, err := o.hardware.TimeSlices(ctx, uuids...)
	if err != nil {
		return err
	}
	for i := range devices {
		devices[i].State.TimeSlice = read[devices[i].UUID]
	}
	return nil
}

// described adds what the host knows of processes to what NVML does. A process of a container that calls itself an MPS
// server is none.
func (o observer) described(processes []gpu.Process) []gpu.Process {
	described := slices.Clone(processes)
	for i := range described {
		p := &described[i]
		on := o.processes.Describe(p.PID)
		p.Name = cmp.Or(on.Name, p.Name)
		p.PodUID = cmp.Or(on.PodUID, p.PodUID)
		p.ContainerID = cmp.Or(on.ContainerID, p.ContainerID)
		p.MPSServer = on.Runs(gpu.MPSServer)
		if p.Name == gpu.MPSServer && !p.MPSServer { // the controller goes by the name that is reported
			p.Name += " (by its own account)"
		}
	}
	return described
}

// lingers reports whether a process of a pod uses a GPU that no container holds: one that is about to end, of which no
// event tells. The controller waits for it.
func lingers(devices []gpu.Device) bool {
	return slices.ContainsFunc(devices, func(d gpu.Device) bool {
		ofPod := func(p gpu.Process) bool { return p.PodUID != "" && !p.MPSServer }
		return len(d.Holders) == 0 && slices.ContainsFunc(d.Processes, ofPod)
	})
}

func byPod(a, b gpu.Holder) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
		cmp.Compare(a.Container, b.Container), cmp.Compare(a.Instance, b.Instance))
}

// reasonOf is the reason of a condition about an observation that failed.
func reasonOf(err error) string {
	if failed, is := errors.AsType[*observationError](err); is {
		return failed.reason
	}
	return v1alpha1.ReasonNVMLFailed
}
