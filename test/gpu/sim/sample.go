// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// idleMemory is what a process has allocated that a test says nothing about: about what a CUDA context takes.
const idleMemory = 256 << 20

// Sample is how the GPUs are used, as gpu.Hardware shows it.
func (n *Node) Sample() gpu.Sample {
	var sample gpu.Sample
	for i := range n.GPUs {
		sample.Devices = append(sample.Devices, n.GPUs[i].sample(i))
	}
	return sample
}

// SetUse says how a process uses a GPU on which it is.
func (n *Node) SetUse(uuid string, use gpu.ProcessUse) error {
	g, err := n.GPU(uuid)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(g.Processes, func(p gpu.Process) bool { return p.PID == use.PID && p.Instance == use.Instance }) {
		return refuse(NotFound, "process %d does not use GPU %s", use.PID, uuid)
	}
	g.forget(func(u gpu.ProcessUse) bool { return u.PID == use.PID && u.Instance == use.Instance })
	g.Uses = append(g.Uses, use)
	return nil
}

func (g *GPU) forget(gone func(gpu.ProcessUse) bool) { g.Uses = slices.DeleteFunc(g.Uses, gone) }

// Use is how a process uses the GPU, as the driver would report it.
func (g *GPU) Use(p gpu.Process) gpu.ProcessUse {
	use := gpu.ProcessUse{PID: p.PID, Instance: p.Instance, MemoryBytes: new(int64(idleMemory))}
	if i := slices.IndexFunc(g.Uses, func(u gpu.ProcessUse) bool { return u.PID == p.PID && u.Instance == p.Instance }); i >= 0 {
		use = g.Uses[i]
	} else if taken := g.taken(p.PID); taken > 0 {
		use.MemoryBytes = new(int64(taken))
	}
	if g.MIG || use.MPSClient {
		use.Utilization = nil
	}
	return use
}

// Memory is that of the GPU, or of one of its instances; nil where the driver does not know it.
func (g *GPU) Memory(instance int) *gpu.Memory {
	mib := g.Spec().MemoryMiB
	if instance != gpu.WholeGPU {
		i, err := g.instance(instance)
		if err != nil {
			return nil
		}
		p, _ := g.Profile(i.Profile)
		mib = p.MemoryMiB
	}
	if mib == 0 {
		return nil
	}
	memory := gpu.Memory{Total: mib << 20}
	for _, p := range g.Processes {
		if use := g.Use(p); use.MemoryBytes != nil && (instance == gpu.WholeGPU || instance == p.Instance) {
			memory.Used += *use.MemoryBytes
		}
	}
	memory.Free = memory.Total - memory.Used
	return &memory
}

// Utilization is that of the whole GPU; nil in MIG mode, in which the driver does not know it.
func (g *GPU) Utilization() *gpu.Utilization {
	if g.MIG {
		return nil
	}
	var sum gpu.Utilization
	for _, p := range g.Processes {
		if use := g.Use(p); use.Utilization != nil {
			sum.Compute = min(1, sum.Compute+use.Utilization.Compute)
			sum.Memory = min(1, sum.Memory+use.Utilization.Memory)
		}
	}
	return &sum
}

// Counts reports whether the GPU has the counters of NVML's GPU performance monitoring: Hopper and later, and not a
// vGPU that has a part of an instance (NVML API reference, "GPM").
func (g *GPU) Counts() bool {
	const hopper = 9
	return g.Spec().ComputeCapability.Major >= hopper && !g.Spec().Virtual
}

// InstanceUtilization is that of one of the GPU's instances; nil where the GPU has no counters.
func (g *GPU) InstanceUtilization(instance int) *gpu.Utilization {
	if _, err := g.instance(instance); err != nil || !g.Counts() {
		return nil
	}
	var sum gpu.Utilization
	for _, u := range g.Uses {
		if u.Instance == instance && u.Utilization != nil {
			sum.Compute, sum.Memory = min(1, sum.Compute+u.Utilization.Compute), min(1, sum.Memory+u.Utilization.Memory)
		}
	}
	return &sum
}

func (g *GPU) sample(index int) gpu.DeviceUse {
	d := gpu.DeviceUse{UUID: g.UUID, Index: index, Minor: index, Memory: g.Memory(gpu.WholeGPU), Utilization: g.Utilization()}
	for _, i := range g.Instances {
		if len(i.Compute) > 0 {
			d.Instances = append(d.Instances, gpu.InstanceUse{
				ID: i.ID, UUID: i.Compute[0].UUID, ProfileID: i.Profile, Start: i.Placement.Start,
				Memory: g.Memory(i.ID), Utilization: g.InstanceUtilization(i.ID),
			})
		}
	}
	slices.SortStableFunc(d.Instances, func(a, b gpu.InstanceUse) int { return a.ID - b.ID })
	d.Processes = []gpu.ProcessUse{}
	for _, p := range g.Processes {
		d.Processes = append(d.Processes, g.Use(p))
	}
	slices.SortFunc(d.Processes, func(a, b gpu.ProcessUse) int { return cmp.Or(a.PID-b.PID, a.Instance-b.Instance) })
	return d
}

// Sample implements gpu.Hardware.
func (h *Hardware) Sample(ctx context.Context) (gpu.Sample, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.allowed(ctx, OpSample, ""); err != nil {
		return gpu.Sample{}, fmt.Errorf("sampling the GPUs: %w", err)
	}
	return h.node.Sample(), nil
}

// SetUse says how a process uses a GPU.
func (h *Hardware) SetUse(uuid string, use gpu.ProcessUse) (err error) {
	h.Update(func(n *Node) { err = n.SetUse(uuid, use) })
	return err
}
