// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// show shows something of each chosen GPU.
func (s smi) show(one func(state *simdriver.State, index int, g *sim.GPU)) error {
	state, err := s.driver.Read()
	if err != nil {
		return err
	}
	gpus, err := s.chosen(state)
	if err != nil {
		return err
	}
	for _, g := range gpus {
		for i := range state.Node.GPUs {
			if &state.Node.GPUs[i] == g {
				one(state, i, g)
			}
		}
	}
	return nil
}

// version lists the versions of the program, of the library and of the kernel module. It looks at no GPU.
func (s smi) version() error {
	state, err := s.driver.Read()
	if err != nil {
		return err
	}
	own := simdriver.OwnVersion()
	nvml := own
	if parts := strings.Split(own, "."); len(parts) > 2 {
		nvml = strings.Join(parts[:2], ".")
	}
	s.say("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s", own, nvml, state.Node.DriverVersion)
	return nil
}

func (s smi) list() error {
	return s.show(func(_ *simdriver.State, index int, g *sim.GPU) {
		s.say("GPU %d: %s (UUID: %s)", index, g.Spec().Product, g.UUID)
		device := 0
		for _, i := range g.Instances {
			p, _ := g.Profile(i.Profile)
			for _, c := range i.Compute {
				s.say("  MIG %-15s Device %2d: (UUID: %s)", computeName(p, c), device, c.UUID)
				device++
			}
		}
	})
}

func computeName(p sim.Profile, c sim.ComputeInstance) string {
	if c.Slices == p.Slices {
		return p.Name
	}
	return fmt.Sprintf("%dc.%s", c.Slices, p.Name)
}

// query answers --query-gpu=name,uuid,… as comma-separated values.
func (s smi) query() error {
	fields := strings.Split(s.options["--query-gpu"], ",")
	for i, f := range fields {
		fields[i] = strings.TrimSpace(f)
		if _, ok := value(fields[i], 0, &sim.GPU{}, "", false); !ok {
			return &sim.Error{Return: sim.InvalidArgument, Why: fmt.Sprintf("Field %q is not a valid field to query", fields[i])}
		}
	}
	if !strings.Contains(s.options["--format"], "noheader") {
		s.say("%s", strings.Join(fields, ", "))
	}
	return s.show(func(state *simdriver.State, index int, g *sim.GPU) {
		var values []string
		for _, f := range fields {
			v, _ := value(f, index, g, state.Node.DriverVersion, g.Persistence || s.driver.Persistent(g.UUID))
			values = append(values, v)
		}
		s.say("%s", strings.Join(values, ", "))
	})
}

func value(field string, index int, g *sim.GPU, driver string, persistent bool) (string, bool) {
	switch field {
	case "index":
		return fmt.Sprint(index), true
	case "uuid", "gpu_uuid":
		return g.UUID, true
	case "name", "gpu_name":
		return g.Spec().Product, true
	case "count", "driver_version":
		return driver, true
	case "pci.bus_id", "gpu_bus_id":
		return busID(g), true
	case "memory.total":
		return fmt.Sprintf("%d MiB", g.Spec().MemoryMiB), true
	case "compute_cap":
		return g.Spec().ComputeCapability.String(), true
	case "compute_mode":
		return modeName(g.ComputeMode), true
	case "persistence_mode":
		return enabled(persistent), true
	case "mig.mode.current":
		return migMode(g, g.MIG), true
	case "mig.mode.pending":
		return migMode(g, g.PendingMIG), true
	}
	return "", false
}

func modeName(m gpu.ComputeMode) string {
	switch m {
	case gpu.ComputeProhibited:
		return "Prohibited"
	case gpu.ComputeExclusiveProcess:
		return "Exclusive_Process"
	case gpu.ComputeDefault:
	}
	return "Default"
}

func enabled(on bool) string {
	if on {
		return "Enabled"
	}
	return "Disabled"
}

func migMode(g *sim.GPU, on bool) string {
	if !g.Spec().MIGCapable() {
		return "[N/A]"
	}
	return enabled(on)
}

func (s smi) details() error {
	return s.show(func(state *simdriver.State, _ int, g *sim.GPU) {
		s.say("GPU %s", busID(g))
		for _, line := range [][2]string{
			{"Product Name", g.Spec().Product},
			{"GPU UUID", g.UUID},
			{"Driver Version", state.Node.DriverVersion},
			{"Persistence Mode", enabled(g.Persistence || s.driver.Persistent(g.UUID))},
			{"MIG Mode Current", migMode(g, g.MIG)},
			{"MIG Mode Pending", migMode(g, g.PendingMIG)},
			{"FB Memory Usage Total", fmt.Sprintf("%d MiB", g.Spec().MemoryMiB)},
			{"Compute Mode", modeName(g.ComputeMode)},
		} {
			s.say("    %-39s : %s", line[0], line[1])
		}
		for _, p := range g.Processes {
			s.say("    Process ID %d: %s", p.PID, p.Name)
		}
	})
}

func (s smi) table() error {
	s.say("GPU  Name                      Bus-Id            MIG M.    Compute M.         Memory  Processes")
	return s.show(func(_ *simdriver.State, index int, g *sim.GPU) {
		s.say("%3d  %-24s  %s  %-8s  %-17s  %6d  %d", index, g.Spec().Product, busID(g), migMode(g, g.MIG),
			modeName(g.ComputeMode), g.Spec().MemoryMiB, len(g.Processes))
		for _, i := range g.Instances {
			p, _ := g.Profile(i.Profile)
			s.say("       MIG %-15s  GI %2d  %s", p.Name, i.ID, i.Placement)
		}
	})
}
