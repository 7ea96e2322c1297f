// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// Want is the state that a GPU must have to be shared as desired, with the instances placed so that as many as possible
// of those that are there are kept. Errors: *Problem.
func Want(s v1alpha1.DeviceSharing, d gpu.Device) (gpu.State, error) {
	if s.MIGMode == v1alpha1.MIGModeEnabled {
		return wantMIG(s.Instances, d)
	}
	want := wantWhole(s, d)
	want.TimeSlice = gpu.TimeSlice(s.TimeSliceInterval)
	return want, nil
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
