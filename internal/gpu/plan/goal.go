// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

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
