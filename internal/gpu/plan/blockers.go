// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Blocker is a process or a container that uses what a step needs to be idle.
type Blocker struct {
	UUID     string // of the GPU
	Instance int    // or gpu.WholeGPU
	Process  *gpu.Process
	Holder   *gpu.Holder
	Claim    string // a ResourceClaim that has it though no pod of the node uses the claim, as namespace/name
}

// Blockers lists all that block a step: by index of the GPU, then instance, processes before holders. An MPS
// server is never one: it goes with its daemon, and its clients count themselves.
func Blockers(s Step, have []gpu.Device) []Blocker {
	blocks := blocking(s)
	var blockers []Blocker
	for _, d := range slices.SortedFunc(slices.Values(have), byIndex) {
		blockers = append(blockers, blockersOn(d, blocks)...)
	}
	return blockers
}

// Blocks reports whether who uses an instance of a GPU, or the GPU as a whole (gpu.WholeGPU), blocks a step.
func Blocks(s Step, uuid string, instance int) bool { return blocking(s)(uuid, instance) }

// blocking reports whether a user of an instance, or of the whole GPU, blocks a step.
func blocking(s Step) func(uuid string, instance int) bool {
	switch s := s.(type) {
	case destroyInstance:
		return func(uuid string, instance int) bool { return uuid == s.device.UUID && instance == s.instance.ID }
	case stopMPS:
		return anyOf(s.devices)
	case startMPS:
		return anyOf(s.fresh())
	case setMIG:
		return func(uuid string, _ int) bool { return slices.Contains(GPUs(s), uuid) }
	}
	return func(uuid string, _ int) bool { return s.Needs() == NeedsGPU && uuid == s.Device() }
}

func anyOf(goals []goal) func(string, int) bool {
	return func(uuid string, _ int) bool {
		return slices.ContainsFunc(goals, func(g goal) bool { return g.device.UUID == uuid })
	}
}

func blockersOn(d gpu.Device, blocks func(string, int) bool) []Blocker {
	var users []Blocker
	for i := range d.Processes {
		if p := &d.Processes[i]; !p.MPSServer && blocks(d.UUID, p.Instance) {
			users = append(users, Blocker{UUID: d.UUID, Instance: p.Instance, Process: p})
		}
	}
	for i := range d.Holders {
		if h := &d.Holders[i]; blocks(d.UUID, h.Instance) {
			users = append(users, Blocker{UUID: d.UUID, Instance: h.Instance, Holder: h})
		}
	}
	slices.SortStableFunc(users, func(a, b Blocker) int { return cmp.Compare(a.Instance, b.Instance) })
	return users
}

func byIndex(a, b gpu.Device) int { return cmp.Compare(a.Index, b.Index) }

// UsedLately reports whether more instances of a profile go from a GPU than nobody has had for so long, by since when nobody has had each, by UUID. Which of them
// go does not matter: pods ask for a profile.
func UsedLately(d *gpu.Device, goes func(gpu.Instance) bool, since map[string]time.Time, idle time.Duration, now time.Time) bool {
	lack := map[string]int{}
	for _, i := range d.State.Instances {
		if goes(i) {
			lack[i.Profile]++
		}
		if at := since[i.UUID]; !at.IsZero() && now.Sub(at) >= idle {
			lack[i.Profile]--
		}
	}
	return slices.Max(append(slices.Collect(maps.Values(lack)), 0)) > 0
}
