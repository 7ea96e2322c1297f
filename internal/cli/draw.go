// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

const (
	// usualWidth is the width of a picture where there is no terminal.
	usualWidth = 100
	// The columns of one memory slice: enough for a name, not so many that a GPU looks like a motorway.
	minSlice, maxSlice = 3, 12
	// wholeGPU names the one block of a GPU without instances.
	wholeGPU = "whole GPU"
	// wholeSlices is how wide a GPU is drawn that has no slices.
	wholeSlices = 8
	// pictureIndent is how far a picture is indented.
	pictureIndent = 4
)

// block is a part of a GPU with who holds it.
type block struct {
	start, size int
	name        string // what it is: a profile; empty: nothing is there
	instance    int    // its id, or gpu.WholeGPU
	users       []string
}

// picture draws each GPU of a node, whose GPUs a stack offers: a row with its instances to the scale of their memory
// slices, or with its replicas, below it who holds them, and the names that did not fit.
func (t *text) picture(n *cluster.Node, stack dra.Stack) {
	devices, pods := devicesOf(n), podsByUID(n)
	replicas := replicasOn(n, n.Offered(stack), devices)
	for _, d := range devices {
		t.row(2, "", heading(d, replicas[d.UUID]))
		total, blocks := blocksOf(d, pods)
		if used := len(holdersOf(d)); !d.State.MIG && replicas[d.UUID] > 1 && used <= replicas[d.UUID] {
			total, blocks = replicaBlocks(replicas[d.UUID], used, holderNames(d, gpu.WholeGPU, pods))
		}
		t.draw(total, blocks)
	}
}

// replicaBlocks divides a GPU into the replicas that containers hold, and the others. They are drawn to scale as far as
// a picture of wholeSlices can.
func replicaBlocks(replicas, used int, users []string) (total int, blocks []block) {
	held := (used*wholeSlices + replicas/2) / replicas
	if used > 0 || len(users) > 0 {
		held = max(held, 1)
	}
	if used < replicas {
		held = min(held, wholeSlices-1)
	}
	if held > 0 {
		blocks = append(blocks, block{size: held, name: count(used, "replica"), instance: gpu.WholeGPU, users: users})
	}
	if held < wholeSlices {
		blocks = append(blocks, block{size: wholeSlices - held, name: count(replicas-used, "replica"), instance: gpu.WholeGPU})
	}
	return wholeSlices, blocks
}

// heading says what a GPU is, how it is shared, and how many containers hold one of its replicas.
func heading(d gpu.Device, replicas int) string {
	parts := []string{fmt.Sprintf("GPU %d", d.Index), d.Product}
	if d.MemoryMiB > 0 {
		const mibPerGiB = 1024
		parts = append(parts, fmt.Sprintf("%.0f GiB", float64(d.MemoryMiB)/mibPerGiB))
	}
	parts = append(parts, modes(d)...)
	if !d.State.MIG && replicas > 1 {
		if d.State.MPS == nil {
			parts = append(parts, string(v1alpha1.StrategyTimeSlicing))
		}
		parts = append(parts, fmt.Sprintf("%d of %d replicas used", len(holdersOf(d)), replicas))
	}
	return strings.Join(parts, "   ")
}

// modes are how a GPU is shared, as far as the GPU itself shows it: of time-slicing the interval alone, where a policy
// names one.
func modes(d gpu.Device) []string {
	var parts []string
	switch m := d.State.MPS; {
	case d.State.MIG:
		parts = append(parts, "MIG")
	case m != nil && m.External:
		parts = append(parts, "MPS by NVIDIA's DaemonSet")
	case m != nil:
		parts = append(parts, mpsLimits(m))
	case d.License == gpu.Unlicensed:
		parts = append(parts, "virtual, without a license")
	case d.Virtual:
		parts = append(parts, "virtual")
	}
	if d.State.TimeSlice != gpu.TimeSliceUnread {
		parts = append(parts, "time-slice interval "+string(d.State.TimeSlice))
	}
	if d.PendingMIG != d.State.MIG {
		parts = append(parts, "MIG mode changes at the next reset")
	}
	return parts
}

// blocksOf divides a GPU into its instances and the room between them.
func blocksOf(d gpu.Device, pods map[string]string) (total int, blocks []block) {
	if !d.State.MIG {
		return wholeSlices, []block{{size: wholeSlices, name: wholeGPU, instance: gpu.WholeGPU, users: holderNames(d, gpu.WholeGPU, pods)}}
	}
	total = max(d.MemorySlices(), 1)
	for _, i := range d.State.Instances {
		total = max(total, i.Placement.Start+i.Placement.Size)
	}
	instances := slices.SortedFunc(slices.Values(d.State.Instances), func(a, b gpu.Instance) int {
		return cmp.Compare(a.Placement.Start, b.Placement.Start)
	})
	at := 0
	for _, i := range instances {
		if i.Placement.Start > at {
			blocks = append(blocks, block{start: at, size: i.Placement.Start - at})
		}
		b := block{start: i.Placement.Start, size: i.Placement.Size, name: i.Profile, instance: i.ID, users: holderNames(d, i.ID, pods)}
		if i.Partial {
			b.name += " incomplete"
		}
		blocks, at = append(blocks, b), i.Placement.Start+i.Placement.Size
	}
	if at < total {
		blocks = append(blocks, block{start: at, size: total - at})
	}
	return total, blocks
}

// holderNames are those who hold a GPU or an instance, each once: pods to which it is allocated, and processes.
func holderNames(d gpu.Device, instance int, pods map[string]string) []string {
	var users []string
	for _, h := range d.Holders {
		if h.Instance == instance {
			users = append(users, h.Namespace+"/"+h.Pod)
		}
	}
	for _, process := range d.Processes {
		if process.Instance == instance && !process.MPSServer {
			users = append(users, userName(process, pods))
		}
	}
	slices.Sort(users)
	return slices.Compact(users)
}

// draw draws blocks to scale, and lists below the users whose names did not fit.
func (t *text) draw(total int, blocks []block) {
	width := t.width
	if width == 0 {
		width = usualWidth
	}
	slice := min(max((width-pictureIndent-1)/total, minSlice), maxSlice)
	var above, below strings.Builder
	var more []block
	for _, b := range blocks {
		room := b.size*slice - 1
		name, users := b.name, strings.Join(b.users, ", ")
		switch {
		case name == "":
			name, users = strings.Repeat(".", room), strings.Repeat(".", room)
		case users == "":
			users = "free"
		case utf8.RuneCountInString(users) > room:
			more = append(more, b)
			if len(b.users) > 1 {
				users = count(len(b.users), "user")
			}
		}
		above.WriteString("|" + fit(name, room))
		below.WriteString("|" + fit(users, room))
	}
	indent := strings.Repeat(" ", pictureIndent)
	t.WriteString(indent + above.String() + "|\n" + indent + below.String() + "|\n")
	for _, b := range more {
		t.row(pictureIndent, "", fmt.Sprintf("%s: %s", b.place(), strings.Join(b.users, ", ")))
	}
}

// place says which part of the GPU a block is.
func (b block) place() string {
	if b.instance == gpu.WholeGPU {
		return b.name
	}
	return fmt.Sprintf("%s at %d:%d", b.name, b.start, b.size)
}

// mpsLimits are the limits of a client of an MPS control daemon.
func mpsLimits(m *gpu.MPSDaemon) string {
	memory := fmt.Sprintf("%d MiB", m.PinnedMemoryLimitMiB)
	if m.PinnedMemoryLimitMiB == 0 {
		memory = "no memory limit"
	}
	limits := fmt.Sprintf("MPS, %d%% of the threads and %s for each client", m.ActiveThreadPercentage, memory)
	if m.MultiUser {
		limits += ", one server for all users"
	}
	return limits
}
