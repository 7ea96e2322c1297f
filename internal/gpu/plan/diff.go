// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// Diff lists the steps that bring one GPU from what it is to what is wanted, MPS aside, which concerns several GPUs. It
// knows no strategy. Instances that are as wanted are left alone.
func Diff(d gpu.Device, want gpu.State) []Step {
	var steps []Step
	for _, i := range surplus(d, want) {
		steps = append(steps, destroyInstance{device: d, instance: i})
	}
	sets := want.TimeSlice != gpu.TimeSliceUnread && d.State.TimeSlice != want.TimeSlice
	if want.MIG && sets && slices.Contains(gpu.TimeSlices(), d.State.TimeSlice) {
		steps = append(steps, setTimeSlice{device: d, slice: want.TimeSlice, early: true})
	}
	switch {
	case d.State.MIG != want.MIG:
		steps = append(steps, setMIG{device: d, enabled: want.MIG})
	case d.PendingMIG != want.MIG:
		steps = append(steps, keepMIG{device: d})
	}
	if !want.MIG && d.State.ComputeMode != want.ComputeMode && (want.MPS == nil || !fleeting(d)) {
		steps = append(steps, setComputeMode{device: d, mode: want.ComputeMode})
	}
	if !want.MIG && sets {
		steps = append(steps, setTimeSlice{device: d, slice: want.TimeSlice})
	}
	for _, i := range missing(d, want) {
		steps = append(steps, createInstance{device: d, instance: i})
	}
	return steps
}

// fleeting reports whether an MPS daemon serves a GPU whose compute mode cannot be kept: it is lost whenever no program
// has the GPU open, and to set it again is in vain.
func fleeting(d gpu.Device) bool {
	return d.State.MPS != nil && d.Persistence == gpu.PersistenceUnsupported
}

// surplus are the instances that have to go. Used ones come first, so that a plan that has to wait for them waits
// before it has destroyed anything; then by placement.
func surplus(d gpu.Device, want gpu.State) []gpu.Instance {
	var free, used []gpu.Instance
	for _, i := range d.State.Instances {
		switch {
		case !i.Partial && slices.ContainsFunc(want.Instances, alike(i)):
		case d.InUse(i.ID):
			used = append(used, i)
		default:
			free = append(free, i)
		}
	}
	slices.SortFunc(free, byPlacement)
	slices.SortFunc(used, byPlacement)
	return append(used, free...)
}

// missing are the instances to create: large ones first, as an operator would by hand, then by placement.
func missing(d gpu.Device, want gpu.State) []gpu.Instance {
	var create []gpu.Instance
	for _, i := range want.Instances {
		there := slices.ContainsFunc(d.State.Instances, func(o gpu.Instance) bool { return !o.Partial && alike(i)(o) })
		if !there {
			create = append(create, i)
		}
	}
	slices.SortStableFunc(create, func(a, b gpu.Instance) int {
		if a.Placement.Size != b.Placement.Size {
			return b.Placement.Size - a.Placement.Size
		}
		return byPlacement(a, b)
	})
	return create
}

func alike(i gpu.Instance) func(gpu.Instance) bool {
	return func(o gpu.Instance) bool { return o.Profile == i.Profile && o.Placement == i.Placement }
}

// goal is a GPU and what is wanted of it.
type goal struct {
	device  gpu.Device
	want    gpu.State
	desired bool // listed in the desired state; otherwise it is wanted as it is
	waits   bool // for an external MPS daemon to go
}

// goalsOf finds what is wanted of each GPU of the node, by index. One that cannot be as desired is wanted as it is.
func goalsOf(desired []v1alpha1.DeviceSpec, have []gpu.Device) ([]goal, error) {
	if err := unknownDevice(desired, have); err != nil {
		return nil, err
	}
	var problems []error
	goals := make([]goal, 0, len(have))
	for _, d := range have {
		g := goal{device: d, want: d.State}
		if spec := specOf(desired, d.UUID); spec != nil {
			want, err := Want(spec.Sharing, d)
			if err == nil {
				err = cmp.Or(timeSliceKnown(d, want), processesKnown(d, want))
			}
			if err != nil {
				problems = append(problems, err)
			} else {
				g.want, g.desired = want, true
			}
		}
		goals = append(goals, g)
	}
	arrange(goals)
	return goals, joined(problems)
}

// processesKnown is the problem of a change that needs a GPU to be idle, where nobody can tell whether it is.
func processesKnown(d gpu.Device, want gpu.State) error {
	disruptive := func(s Step) bool { return s.Needs() != NeedsNothing }
	changesMPS := (d.State.MPS == nil) != (want.MPS == nil)
	if !d.ProcessesUnknown || !changesMPS && !slices.ContainsFunc(Diff(d, want), disruptive) {
		return nil
	}
	return problem(v1alpha1.ReasonProcessesUnknown, "%s: the driver does not report which processes use the GPU, so that changing "+
		"it could end them; update the driver (versions 535.43.02 to 535.86.05 have this defect, and a version in another form may)", d)
}

// arrange puts goals in the order of the GPUs' indexes and marks those that wait.
func arrange(goals []goal) {
	slices.SortStableFunc(goals, func(a, b goal) int { return cmp.Compare(a.device.Index, b.device.Index) })
	markWaiting(goals)
}

// markWaiting marks the GPUs on which nothing is done before an external daemon is gone: those that it serves, and
// those for whose daemon it holds the pipe directory.
func markWaiting(goals []goal) {
	external := map[string]bool{}
	for _, g := range goals {
		if has := g.device.State.MPS; has != nil && has.External {
			external[has.Resource] = true
		}
	}
	for i, g := range goals {
		has, want := g.device.State.MPS, g.want.MPS
		goals[i].waits = has != nil && has.External || want != nil && !want.External && external[want.Resource]
	}
}

func specOf(desired []v1alpha1.DeviceSpec, uuid string) *v1alpha1.DeviceSpec {
	for i := range desired {
		if desired[i].UUID == uuid {
			return &desired[i]
		}
	}
	return nil
}

func unknownDevice(desired []v1alpha1.DeviceSpec, have []gpu.Device) error {
	known := make([]string, 0, len(have))
	for _, d := range have {
		known = append(known, d.UUID)
	}
	for _, spec := range desired {
		if !slices.Contains(known, spec.UUID) {
			return problem(v1alpha1.ReasonUnknownDevice,
				"the node has no GPU %s (any more); it has %s; the controller plans anew once the node reports its GPUs",
				spec.UUID, cmp.Or(strings.Join(known, ", "), "none"))
		}
	}
	return nil
}

// Want is the state that a GPU must have to be shared as desired, with the instances placed so that as many as possible
// of those that are there are kept. Errors: *Problem.
func Want(s v1alpha1.DeviceSharing, d gpu.Device) (gpu.State, error) {
	want, err := wantWhole(s, d), error(nil)
	if s.MIGMode == v1alpha1.MIGModeEnabled {
		want, err = wantMIG(s.Instances, d)
	}
	want.TimeSlice = gpu.TimeSlice(s.TimeSliceInterval)
	return want, err
}

// wantWhole is the state of a GPU outside of MIG mode.
func wantWhole(s v1alpha1.DeviceSharing, d gpu.Device) gpu.State {
	switch {
	case s.MPS != nil && s.MPS.Owner == v1alpha1.MPSDaemonOwnerNVIDIA: // which sets the compute mode, too
		return gpu.State{ComputeMode: d.State.ComputeMode, MPS: daemonOf(*s.MPS)}
	case s.MPS != nil:
		return gpu.State{ComputeMode: gpu.ComputeExclusiveProcess, MPS: daemonOf(*s.MPS)}
	case d.Virtual: // the compute mode is its host's
		return gpu.State{ComputeMode: d.State.ComputeMode}
	}
	return gpu.State{ComputeMode: gpu.ComputeDefault}
}

// wantMIG places the instances. In MIG mode the compute mode is always the default one and cannot be changed
// (nvmlDeviceSetComputeMode).
func wantMIG(instances []v1alpha1.InstanceCount, d gpu.Device) (gpu.State, error) {
	if !d.MIGCapable {
		return gpu.State{}, noMIG(d)
	}
	state := gpu.State{MIG: true, ComputeMode: gpu.ComputeDefault}
	if !d.State.MIG && len(d.Profiles) == 0 {
		return state, nil // this driver tells its profiles in MIG mode only: the next plan goes on
	}
	want := map[string]int{}
	for _, i := range instances {
		want[i.Profile] += int(i.Count)
	}
	if places, lost := formerPlaces(d, want); lost {
		state.Instances = places
		return state, nil
	}
	packing, err := mig.Pack(d, want)
	if err != nil {
		return gpu.State{}, packingProblem(err)
	}
	state.Instances = slices.SortedFunc(slices.Values(slices.Concat(packing.Keep, packing.Create)), byPlacement)
	return state, nil
}

// formerPlaces are the places that the instances of a GPU had, and ok if they are the desired ones and some are lost:
// DRA's names of devices have the place, so that pods run again on the same ResourceClaims after a reboot.
func formerPlaces(d gpu.Device, want map[string]int) (places []gpu.Instance, ok bool) {
	if len(d.Before) == 0 {
		return nil, false
	}
	before := map[string]int{}
	for _, i := range d.Before {
		if !i.Partial {
			before[i.Profile]++
			places = append(places, gpu.Instance{Profile: i.Profile, Placement: i.Placement})
		}
	}
	strange := func(i gpu.Instance) bool { return i.Partial || !slices.ContainsFunc(places, alike(i)) }
	ok = maps.Equal(before, want) && len(d.State.Instances) < len(places) && !slices.ContainsFunc(d.State.Instances, strange)
	slices.SortFunc(places, byPlacement)
	return places, ok
}

// packingProblem is the problem that an error of mig is to the user.
func packingProblem(err error) error {
	if _, unknown := errors.AsType[*mig.ProfileError](err); unknown {
		return problem(v1alpha1.ReasonProfileNotAvailable, "%s; change the profile, or say in "+
			"sharing.mig.layouts[].gpus which GPUs the layout is for", err)
	}
	return problem(v1alpha1.ReasonLayoutDoesNotFit, "%s; ask for fewer or smaller instances in sharing.mig.layouts", err)
}

func noMIG(d gpu.Device) *Problem {
	return problem(v1alpha1.ReasonMIGNotSupported, "%s has no MIG; say in sharing.mig.layouts[].gpus which GPUs the "+
		"layout is for, or leave this one out with gpuSelector", d)
}

func daemonOf(m v1alpha1.MPSDaemon) *gpu.MPSDaemon {
	return &gpu.MPSDaemon{
		Resource:               m.ResourceName,
		External:               m.Owner == v1alpha1.MPSDaemonOwnerNVIDIA,
		MultiUser:              m.MultiUser,
		ActiveThreadPercentage: int(m.ActiveThreadPercentage),
		PinnedMemoryLimitMiB:   MiB(m.PinnedMemoryLimit),
	}
}

func byPlacement(a, b gpu.Instance) int {
	return cmp.Or(cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.Placement.Size, b.Placement.Size))
}
