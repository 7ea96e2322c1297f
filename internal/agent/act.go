// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

const (
	// freshFor is how old the observation may be on which a step that needs something idle is carried out.
	freshFor = time.Second
	// maxRounds is how often a plan is made anew in one reconcile, since some of what is left to do shows only after a
	// step.
	maxRounds = 4
)

// outcome is what became of a desired state.
type outcome struct {
	problem    *plan.Problem // the desired state cannot be reached
	unknown    []string      // UUIDs in the spec that the node does not have
	waits      []string      // what is waited for, in words
	failures   []failure
	pending    []string // GPUs whose MIG mode waits for a reboot, in words
	reboot     reboot   // what becomes of those
	unrecorded []string // UUIDs of GPUs whose former time slice is not in the baseline yet
	unmet      []string // GPUs that do not match the desired state though nothing is left to do, in words
	restored   []string // what became of GPUs on which a step failed, in words
	nodes      error    // why device nodes of MIG instances are missing
}

// failure is a step that failed.
type failure struct {
	step plan.Step
	err  error
}

// retry is why the reconcile must be made again soon.
func (o outcome) retry() error {
	errs := make([]error, 0, len(o.failures)+1)
	errs = append(errs, o.nodes)
	for _, f := range o.failures {
		errs = append(errs, f.err)
	}
	return errors.Join(errs...)
}

// waiting reports whether something is waited for of which no event tells, other than a reboot.
func (o outcome) waiting() bool {
	return len(o.waits)+len(o.reboot.waits) > 0 || len(o.unmet) > len(o.pending)
}

// applier brings the GPUs to a desired state.
type applier struct{ observer }

// converge carries out plan after plan until nothing is left to do or something blocks it, and returns the last
// observation. What fails is rolled back. An error means that there is none.
func (c applier) converge(
	ctx context.Context, spec v1alpha1.GPUNodeSpec, before observation,
) (observation, outcome, error) {
	desired, unknown := split(spec.Devices, before.devices)
	if err := c.mps.Prune(ctx, kept(desired)); err != nil {
		return before, outcome{}, notObserved(v1alpha1.ReasonMPSDaemonFailed, "withdrawing what MPS control daemons were asked for", err)
	}
	now := before
	for round := 1; ; round++ {
		o := outcome{unknown: unknown}
		var allowed []v1alpha1.DeviceSpec
		allowed, o.unrecorded = plan.WithoutUnrecorded(desired, baselineOf(spec), now.devices)
		steps, err := plan.Node(allowed, now.devices)
		if err != nil && !errors.As(err, &o.problem) {
			return now, o, fmt.Errorf("planning: %w", err)
		}
		if spec.MIGActuator == v1alpha1.MIGActuatorMIGManager {
			steps = plan.WithoutMIG(steps)
		}
		acted, err := c.run(ctx, steps, now, &o)
		if err == nil && acted {
			now, err = c.observe(ctx)
		}
		if err != nil {
			return observation{}, o, err
		}
		if !acted || len(o.failures)+len(o.waits) > 0 || round == maxRounds {
			return c.conclude(ctx, desired, before, now, o)
		}
	}
}

// baselineOf are the GPUs of the baseline in a spec.
func baselineOf(spec v1alpha1.GPUNodeSpec) []v1alpha1.DeviceSpec {
	if spec.Baseline == nil {
		return nil
	}
	return spec.Baseline.Devices
}

// conclude rolls back what failed and sums up.
func (c applier) conclude(
	ctx context.Context, desired []v1alpha1.DeviceSpec, before, now observation, o outcome,
) (observation, outcome, error) {
	o.failures, o.pending = needReboot(o.failures, now.devices)
	now, err := c.rollBack(ctx, before, now, &o)
	if err != nil {
		return observation{}, o, err
	}
	persistence{c.tools}.restoreUnused(ctx, desired, now.devices)
	if o.problem == nil { // which says already what does not match
		o.unmet = unmet(desired, now.devices)
	}
	return now, o, nil
}

// split takes out of a spec the GPUs that the node does not have.
func split(desired []v1alpha1.DeviceSpec, devices []gpu.Device) (known []v1alpha1.DeviceSpec, unknown []string) {
	for _, spec := range desired {
		if _, found := find(devices, spec.UUID); found {
			known = append(known, spec)
		} else {
			unknown = append(unknown, spec.UUID)
		}
	}
	return known, unknown
}

func find(devices []gpu.Device, uuid string) (gpu.Device, bool) {
	for _, d := range devices {
		if d.UUID == uuid {
			return d, true
		}
	}
	return gpu.Device{}, false
}

// kept reports of an MPS daemon whether the spec asks for it, or leaves one of its GPUs as it is.
func kept(desired []v1alpha1.DeviceSpec) func(plan.Daemon) bool {
	return func(d plan.Daemon) bool {
		return slices.ContainsFunc(d.Devices, func(served plan.DaemonDevice) bool {
			i := slices.IndexFunc(desired, func(spec v1alpha1.DeviceSpec) bool { return spec.UUID == served.UUID })
			return i < 0 || desired[i].Sharing.MPS != nil && desired[i].Sharing.MPS.ResourceName == d.Resource
		})
	}
}

// needReboot takes out of the failures the GPUs that have a MIG mode pending and cannot be reset here: trying again
// does not help them.
func needReboot(failures []failure, devices []gpu.Device) (others []failure, pending []string) {
	for _, f := range failures {
		d, found := find(devices, f.step.Device())
		if found && d.PendingMIG != d.State.MIG && errors.Is(f.err, gpu.ErrNotSupported) {
			pending = append(pending, d.String()+remedy(f.err))
		} else {
			others = append(others, f)
		}
	}
	return others, pending
}

// remedy says what else than a reboot helps, if anything does.
func remedy(err error) string {
	if module, ok := errors.AsType[*gpu.ModuleError](err); ok {
		return fmt.Sprintf(" (%s)", module)
	}
	return ""
}

// unmet lists the GPUs that do not match the desired state.
func unmet(desired []v1alpha1.DeviceSpec, devices []gpu.Device) []string {
	var unmet []string
	for _, spec := range desired {
		if d, found := find(devices, spec.UUID); found && !met(spec.Sharing, plan.Observed(d)) {
			unmet = append(unmet, d.String())
		}
	}
	return unmet
}

// met reports whether a GPU matches the desired state. NVIDIA's own MPS daemon comes only when the node's device plugin
// is configured for it, which waits for us: its absence is no difference.
func met(desired, observed v1alpha1.DeviceSharing) bool {
	if desired.MPS != nil && desired.MPS.Owner == v1alpha1.MPSDaemonOwnerNVIDIA && observed.MPS == nil {
		desired.MPS = nil
	}
	return plan.Met(desired, observed)
}
