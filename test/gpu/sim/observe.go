// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Observe is the node as gpu.Hardware shows it.
func (n *Node) Observe() gpu.Inventory {
	inv := gpu.Inventory{DriverVersion: n.DriverVersion}
	for i := range n.GPUs {
		d := n.GPUs[i].observe(i)
		if !n.GPUs[i].Persistence && !n.persistenced(d.UUID) {
			d.Persistence = gpu.PersistenceOff
		}
		inv.Devices = append(inv.Devices, d)
	}
	return inv
}

// persistenced reports whether nvidia-persistenced has a GPU open.
func (n *Node) persistenced(uuid string) bool {
	return slices.ContainsFunc(n.Clients, func(c Client) bool { return c.Program == "nvidia-persistenced" && c.Opens(uuid) })
}

func (g *GPU) observe(index int) gpu.Device {
	spec := g.Spec()
	d := gpu.Device{
		UUID: g.UUID, Index: index, Minor: index, PCIBusID: g.PCIBusID, Product: spec.Product, MemoryMiB: spec.MemoryMiB,
		ComputeCapability: spec.ComputeCapability, Virtual: spec.Virtual, MIGCapable: spec.MIGCapable(),
		PendingMIG: g.PendingMIG, Processes: slices.Clone(g.Processes), Holders: slices.Clone(g.Holders),
		State: gpu.State{MIG: g.MIG, ComputeMode: g.ComputeMode}, Profiles: profiles()[g.Model],
	}
	switch {
	case spec.Virtual && g.Unlicensed:
		d.License = gpu.Unlicensed
	case spec.Virtual:
		d.License = gpu.Licensed
	}
	if len(g.Instances) > 0 {
		d.State.Instances = make([]gpu.Instance, 0, len(g.Instances))
	}
	for _, i := range g.Instances {
		d.State.Instances = append(d.State.Instances, i.observe(d.Profiles))
	}
	return d
}

// profiles are those of each model, which all observations share.
var profiles = sync.OnceValue(func() map[Model][]gpu.Profile {
	all := map[Model][]gpu.Profile{}
	for _, m := range Models() {
		spec, _ := SpecOf(m)
		for _, p := range spec.Profiles {
			all[m] = append(all[m], p.Profile)
		}
		all[m] = slices.Clip(all[m])
	}
	return all
})

func (i GPUInstance) observe(profiles []gpu.Profile) gpu.Instance {
	seen := gpu.Instance{Placement: i.Placement, ID: i.ID, Partial: true}
	for n := range profiles {
		p := &profiles[n]
		if p.ID != i.Profile {
			continue
		}
		if seen.Profile = p.Name; len(i.Compute) == 1 && i.Compute[0].Slices == p.Slices {
			seen.Partial, seen.UUID = false, i.Compute[0].UUID
		}
	}
	return seen
}

// describePeers says of each GPU which others must be reset with it.
func (n *Node) describePeers(devices []gpu.Device) {
	for i := range devices {
		for j := range devices {
			if i != j && n.GPUs[i].switched() && n.GPUs[j].switched() {
				devices[i].ResetPeers = append(devices[i].ResetPeers, devices[j].UUID)
			}
		}
	}
}
