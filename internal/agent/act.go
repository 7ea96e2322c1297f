// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
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

// rollBack makes the GPUs on which a step failed what they were before the reconcile, as far as that can be done, so
// that what was usable stays so until the spec is tried again. It returns what is so then.
func (c applier) rollBack(ctx context.Context, before, now observation, o *outcome) (observation, error) {
	if len(o.failures) == 0 {
		return now, nil
	}
	var broken []gpu.Device
	for _, d := range before.devices {
		if slices.ContainsFunc(o.failures, func(f failure) bool { return f.leaves(d.UUID) }) {
			broken = append(broken, d)
		}
	}
	steps := plan.Back(broken, now.devices)
	if len(steps) == 0 {
		return now, nil
	}
	var back outcome
	if _, err := c.run(ctx, steps, now, &back); err != nil {
		return now, err
	}
	now, err := c.observe(ctx)
	if err != nil {
		return now, err
	}
	o.restored = restored(broken, now.devices, back)
	return now, nil
}

// leaves reports whether a failure leaves a GPU that has to be rolled back. One whose MPS daemon does not start has
// not: to go back might mean another reset, and the daemon is tried again.
func (f failure) leaves(uuid string) bool {
	return !errors.Is(f.err, mps.ErrDaemon) && slices.Contains(plan.GPUs(f.step), uuid)
}

// restored says which GPUs are as they were, and why others are not.
func restored(before, now []gpu.Device, back outcome) []string {
	left := plan.Back(before, now)
	var said []string
	for _, d := range before {
		if !slices.ContainsFunc(left, func(s plan.Step) bool { return slices.Contains(plan.GPUs(s), d.UUID) }) {
			said = append(said, d.String()+" is as it was before")
		}
	}
	for _, f := range back.failures {
		said = append(said, "rolling back failed: "+f.err.Error())
	}
	for _, wait := range back.waits {
		said = append(said, "rolling back waits: "+wait)
	}
	return said
}

// How often within what time MIG instances are made again that another program changes.
const (
	maxRebuilds   = 3
	rebuildWindow = time.Hour
)

// rebuild decides what to do about MIG instances that matched the desired state and do not any more though neither the
// spec nor the boot has changed: another program changed them. They are made again a few times, and then left. It
// returns when they were made again within the last hour, this time with it.
func rebuild(node *v1alpha1.GPUNode, bootID string, devices []gpu.Device, now time.Time) (at []metav1.Time, leave *plan.Problem) {
	for _, t := range node.Status.RebuildTimes {
		if age := now.Sub(t.Time); age >= 0 && age < rebuildWindow { // one from the future tells that the clock was wrong
			at = append(at, t)
		}
	}
	changed := changedMIG(node.Spec.Devices, devices)
	if len(changed) == 0 || !wasDone(node, bootID) {
		return at, nil
	}
	if len(at) < maxRebuilds {
		return append(slices.Clone(at), metav1.NewTime(now.Truncate(time.Second))), nil
	}
	until := at[len(at)-maxRebuilds].Add(rebuildWindow)
	return at, &plan.Problem{
		Reason: v1alpha1.ReasonChangedByOthers,
		Message: fmt.Sprintf("another program keeps changing MIG or the time-slice interval on %s; the agent restored it %d times within an hour and leaves it "+
			"until %s UTC; stop that program, such as a MIG service of the host",
			strings.Join(changed, "; "), len(at), until.UTC().Format("15:04:05")),
	}
}

// wasDone reports whether the last reconcile found the GPUs as this spec asks, in this boot, or left them to another
// program.
func wasDone(node *v1alpha1.GPUNode, bootID string) bool {
	applied, found := condition.Find(node.Status.Conditions, v1alpha1.ConditionApplied)
	if !found || applied.ObservedGeneration != node.Generation || node.Status.BootID != bootID {
		return false
	}
	return applied.Status == metav1.ConditionTrue || applied.Reason == v1alpha1.ReasonChangedByOthers
}

// changedMIG names the GPUs whose MIG mode or instances do not match the desired state, with what is there.
func changedMIG(desired []v1alpha1.DeviceSpec, devices []gpu.Device) []string {
	var changed []string
	for _, spec := range desired {
		d, found := find(devices, spec.UUID)
		if !found {
			continue
		}
		is, want := plan.Observed(d), spec.Sharing
		is.MPS, want.MPS = nil, nil
		if !plan.Met(want, is) {
			changed = append(changed, fmt.Sprintf("%s (%s)", d, partition(is, want)))
		}
	}
	return changed
}

// partition says how a GPU is partitioned.
func partition(s, want v1alpha1.DeviceSharing) string {
	if s.MIGMode == want.MIGMode && s.TimeSliceInterval != want.TimeSliceInterval {
		return "now with time-slice interval " + cmp.Or(string(s.TimeSliceInterval), "unknown")
	}
	if s.MIGMode != v1alpha1.MIGModeEnabled {
		return "now without MIG"
	}
	var parts []string
	for _, i := range s.Instances {
		parts = append(parts, fmt.Sprintf("%d x %s", i.Count, i.Profile))
	}
	if len(parts) == 0 {
		return "now in MIG mode without instances"
	}
	return "now " + strings.Join(parts, ", ")
}

// smiTimeout bounds a run of nvidia-smi, the longest of which resets GPUs, which takes seconds.
const smiTimeout = 2 * time.Minute

// SMI runs the nvidia-smi of the driver that is there now and returns what it printed. What it says of a failure is
// part of the error. The program runs in the driver's own root, where it reaches nvidia-persistenced and the fabric
// manager.
func SMI(runner host.Runner, find func() (driver.Driver, error)) func(ctx context.Context, args ...string) (string, error) {
	return func(ctx context.Context, args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, smiTimeout)
		defer cancel()
		found, err := find()
		if err != nil {
			return "", err
		}
		command, err := found.Inside("nvidia-smi", args...)
		if err != nil {
			return "", err
		}
		return runner.Run(ctx, command)
	}
}

// DeviceNodes are the device nodes of MIG instances, which pods need, and which no kernel makes.
type DeviceNodes interface {
	// Ensure makes those that are missing. It changes nothing if none is.
	Ensure(ctx context.Context) error
}

// ensureDeviceNodes keeps the device nodes of the instances that the spec asks for. The controller brings NVIDIA's
// device plugin back only when they are there. NVIDIA's mig-manager makes those of its own instances.
func (c *Controller) ensureDeviceNodes(ctx context.Context, spec v1alpha1.GPUNodeSpec) error {
	partitions := slices.ContainsFunc(spec.Devices, func(d v1alpha1.DeviceSpec) bool { return len(d.Sharing.Instances) > 0 })
	if c.nodes == nil || !partitions || spec.MIGActuator == v1alpha1.MIGActuatorMIGManager {
		return nil
	}
	return c.nodes.Ensure(ctx)
}
