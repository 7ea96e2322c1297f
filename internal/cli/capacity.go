// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// parts are what a node's GPUs are worth to a container: what an administrator works out before applying a policy.
type parts struct {
	unused facts // the slices that a MIG layout leaves unused
	memory facts // what a container may take of the memory
	before facts // how each GPU was shared before the operator
}

// facts are sentences about GPUs. GPUs of which the same is true share a line.
type facts []fact

type fact struct {
	product, says string
	indexes       []string
}

func (f *facts) add(d gpu.Device, says string) {
	product := gpu.ProductLabel(d.Product)
	at := slices.IndexFunc(*f, func(x fact) bool { return x.product == product && x.says == says })
	if at < 0 {
		at = len(*f)
		*f = append(*f, fact{product: product, says: says})
	}
	(*f)[at].indexes = append((*f)[at].indexes, fmt.Sprint(d.Index))
}

func (f *facts) lines() []string {
	lines := make([]string, 0, len(*f))
	for _, x := range *f {
		lines = append(lines, fmt.Sprintf("GPU %s (%s): %s", strings.Join(x.indexes, ", "), x.product, x.says))
	}
	return lines
}

// partsOf works out the parts of the GPUs that the operator changes on a node.
func partsOf(n rollout.NodeState, devices []gpu.Device) parts {
	var p parts
	for _, d := range devices {
		at := slices.IndexFunc(n.Devices, func(s v1alpha1.DeviceSpec) bool { return s.UUID == d.UUID })
		if at < 0 {
			continue
		}
		sharing := n.Devices[at].Sharing
		if n.Policy == "" {
			p.before.add(d, sharingOf(sharing))
			continue
		}
		want, err := plan.Want(sharing, d)
		if err != nil {
			continue // the node cannot have it, and says why
		}
		switch {
		case want.MIG:
			p.instances(n, d, want.Instances)
		case want.MPS != nil:
			p.memory.add(d, mpsShare(*want.MPS, replicas(n, want.MPS.Resource), d.MemoryMiB))
		case wholeReplicas(n) > 1:
			p.memory.add(d, together(wholeReplicas(n), gib(d.MemoryMiB), "each GPU", n.Limited))
		}
	}
	return p
}

// instances adds what the instances of a GPU are worth.
func (p *parts) instances(n rollout.NodeState, d gpu.Device, instances []gpu.Instance) {
	if says := unusedOf(d, instances); says != "" {
		p.unused.add(d, says)
	}
	seen := map[string]bool{}
	for _, i := range instances {
		profile, known := d.Profile(i.Profile)
		if count := instanceReplicas(n, i.Profile); known && count > 1 && !seen[i.Profile] {
			p.memory.add(d, together(count, gib(profile.MemoryMiB), "each instance "+i.Profile, false))
		}
		seen[i.Profile] = true
	}
}

// unusedOf says which slices of a GPU no instance has; empty: all are used.
func unusedOf(d gpu.Device, instances []gpu.Instance) string {
	unused := plan.Unused(d, instances)
	var says []string
	if unused.Compute > 0 {
		says = append(says, fmt.Sprintf("%d of %d compute slices", unused.Compute, d.ComputeSlices()))
	}
	if unused.Memory > 0 {
		slices := d.MemorySlices()
		says = append(says, fmt.Sprintf("%d of %d memory slices (%s)", unused.Memory, slices, gib(d.MemoryMiB*int64(unused.Memory)/int64(slices))))
	}
	return strings.Join(says, " and ")
}

// together is what a share by time-slicing means: nobody has memory of its own.
func together(count int32, memory, of string, limited bool) string {
	takes := "nothing reserves or limits what one takes"
	if limited {
		takes = "nothing reserves memory, and the driver limits what a pod takes, where it can"
	}
	return fmt.Sprintf("%d containers share the %s of %s; %s", count, cmp.Or(memory, "memory"), of, takes)
}

// mpsShare is what a share by MPS means: each process of a container is a client, and has the limits for itself.
func mpsShare(m gpu.MPSDaemon, count int32, memoryMiB int64) string {
	each := fmt.Sprintf("each MPS client (a process) gets up to %d%% of the threads", m.ActiveThreadPercentage)
	total := m.PinnedMemoryLimitMiB * int64(max(count, 1))
	switch {
	case m.PinnedMemoryLimitMiB == 0:
		return each + ", and nothing limits its memory"
	case memoryMiB > 0 && total > memoryMiB:
		return fmt.Sprintf("%s and %s of memory; %d clients that take it all need %s, and the GPU has %s", each,
			gib(m.PinnedMemoryLimitMiB), count, gib(total), gib(memoryMiB))
	}
	return fmt.Sprintf("%s and %s of memory", each, gib(m.PinnedMemoryLimitMiB))
}

// gib is an amount of memory in GiB; empty: not known.
func gib(mib int64) string {
	const mibPerGiB = 1024
	if mib == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f GiB", float64(mib)/mibPerGiB)
}

// replicas is how often something is advertised by its resource.
func replicas(n rollout.NodeState, resource string) int32 { return max(n.Replicas[resource], 1) }

func wholeReplicas(n rollout.NodeState) int32 {
	return max(n.Replicas[plan.ResourceGPU], replicas(n, plan.ResourceGPUShared))
}

// instanceReplicas is how often the instances of a profile are advertised: by their own resource or, with strategy
// single of NVIDIA's device plugin, as GPUs.
func instanceReplicas(n rollout.NodeState, profile string) int32 {
	own := plan.ResourceOf(profile)
	for _, name := range []string{own, own + ".shared"} {
		if n.Expected[name] > 0 {
			return replicas(n, name)
		}
	}
	return wholeReplicas(n)
}

// sharingOf says how a GPU is shared.
func sharingOf(s v1alpha1.DeviceSharing) string {
	switch {
	case s.MIGMode == v1alpha1.MIGModeEnabled && len(s.Instances) == 0:
		return "in MIG mode, without instances"
	case s.MIGMode == v1alpha1.MIGModeEnabled:
		var instances []string
		for _, i := range s.Instances {
			instances = append(instances, fmt.Sprintf("%d × %s", i.Count, i.Profile))
		}
		return strings.Join(instances, ", ")
	case s.MPS != nil:
		return "whole, served by an MPS daemon"
	}
	return "whole"
}
