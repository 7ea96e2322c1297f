// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import "slices"

// Lane is a part of a plan that is carried out step by step, beside other lanes.
type Lane []Step

// The stages of a plan. MPS daemons serve several GPUs, so they go before and come after. Changes of MIG mode are a
// stage of their own: a reset needs every handle closed, which the work on no other GPU then has open.
const (
	stopping = iota
	clearing
	switching
	filling
	starting
	allStages
)

// Stages arranges a plan for GPUs side by side. One stage follows the other; within a stage each GPU has a lane of its
// own, and MPS daemons have one together. Where no MIG mode changes, no GPU waits for another between what it loses and
// what it gets.
func Stages(steps []Step) [][]Lane {
	var stages [allStages]struct {
		keys  []string
		lanes []Lane
	}
	switches := slices.ContainsFunc(steps, Step.Closes)
	for _, s := range steps {
		n, key := stageOf(s)
		if n == filling && !switches {
			n = clearing
		}
		at := &stages[n]
		i := slices.Index(at.keys, key)
		if i < 0 {
			i = len(at.keys)
			at.keys, at.lanes = append(at.keys, key), append(at.lanes, nil)
		}
		at.lanes[i] = append(at.lanes[i], s)
	}
	var used [][]Lane
	for _, stage := range stages {
		if len(stage.lanes) > 0 {
			used = append(used, stage.lanes)
		}
	}
	return used
}

// stageOf is the stage of a step, and the lane within it.
func stageOf(s Step) (stage int, lane string) {
	switch s := s.(type) {
	case stopMPS:
		return stopping, ""
	case destroyInstance:
		return clearing, s.Device()
	case setTimeSlice:
		if s.early {
			return clearing, s.Device()
		}
	case setMIG:
		return switching, s.Device()
	case startMPS:
		return starting, ""
	}
	return filling, s.Device()
}
