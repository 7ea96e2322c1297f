// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// migCommand is nvidia-smi mig: the instances of the chosen GPUs.
type migCommand struct{ smi }

func (s migCommand) do() error {
	has := s.options.has
	switch {
	case has("-lgip"):
		return s.listProfiles()
	case has("-lgipp"):
		return s.listPlacements()
	case has("-lgi"):
		return s.listInstances()
	case has("-lci"):
		return s.listCompute()
	case has("-cgi"):
		return s.create()
	case has("-dci"):
		return s.destroyCompute()
	case has("-dgi"):
		return s.destroy()
	}
	return &sim.Error{Return: sim.InvalidArgument, Why: "one of -lgip, -lgipp, -lgi, -lci, -cgi, -dci, -dgi is needed"}
}

const rule = "+-----------------------------------------------------------------------------+"

func (s migCommand) listProfiles() error {
	s.say("%s\n| GPU instance profiles:                                                      |", rule)
	s.say("| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |")
	s.say("|                                Free/Total   GiB              CE    JPEG  OFA  |\n%s", rule)
	return s.show(func(_ *simdriver.State, index int, g *sim.GPU) {
		for _, p := range g.Spec().Profiles {
			free := 0
			if g.MIG {
				free = g.RemainingCapacity(p)
			}
			s.say("| %3d  %-18s %3d     %d/%-8d %-10.2f No   %4d  %4d  %4d  |", index, "MIG "+p.Name, p.ID, free, p.Max,
				float64(p.MemoryMiB)/1024, p.Multiprocessors, p.Decoders, p.Encoders)
			s.say("| %44s %12d  %4d  %4d  |", "", p.CopyEngines, p.JPEGs, p.OFAs)
		}
	})
}

func (s migCommand) listPlacements() error {
	return s.show(func(_ *simdriver.State, index int, g *sim.GPU) {
		for _, p := range g.Spec().Profiles {
			starts := strings.Trim(strings.ReplaceAll(fmt.Sprint(p.Starts), " ", ","), "[]")
			s.say("GPU %2d Profile ID %2d Placements: {%s}:%d", index, p.ID, starts, p.Size)
		}
	})
}

func (s migCommand) listInstances() error {
	return s.showInstances("GPU instances", func(index int, p sim.Profile, i sim.GPUInstance) {
		s.say("| %3d  %-18s %5d  %8d        %6s |", index, "MIG "+p.Name, p.ID, i.ID, i.Placement)
	})
}

func (s migCommand) listCompute() error {
	return s.showInstances("compute instances", func(index int, p sim.Profile, i sim.GPUInstance) {
		for _, c := range i.Compute {
			s.say("| %3d  %4d  %-18s %5d  %10d:%d |", index, i.ID, "MIG "+computeName(p, c), c.ID, c.Start, c.Slices)
		}
	})
}

func (s migCommand) showInstances(what string, one func(index int, p sim.Profile, i sim.GPUInstance)) error {
	found := false
	err := s.show(func(_ *simdriver.State, index int, g *sim.GPU) {
		for _, i := range g.Instances {
			if !found {
				s.say("%s\n| %s:", rule, what)
			}
			found = true
			p, _ := g.Profile(i.Profile)
			one(index, p, i)
		}
	})
	if err == nil && !found {
		return &sim.Error{Return: sim.NotFound, Why: "No " + what + " found"}
	}
	return err
}

// create serves -cgi, whose items are driver ids or names, each with a placement or not: 9,3g.20gb:4.
func (s migCommand) create() error {
	_, compute := s.options["-C"]
	return s.each("nvmlDeviceCreateGpuInstance", func(state *simdriver.State, g *sim.GPU) error {
		for item := range strings.SplitSeq(s.options["-cgi"], ",") {
			p, at, err := wanted(g, item)
			if err != nil {
				return err
			}
			i, err := state.Node.CreateGPUInstance(g.UUID, p.ID, at)
			if err != nil {
				return err
			}
			id := i.ID
			s.say("Successfully created GPU instance ID %2d on GPU %2s using profile MIG %s (ID %2d)", id, busID(g), p.Name, p.ID)
			if compute {
				if _, err := state.Node.CreateComputeInstance(g.UUID, id, p.Slices); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func wanted(g *sim.GPU, item string) (sim.Profile, *gpu.Placement, error) {
	name, start, placed := strings.Cut(item, ":")
	profiles := g.Spec().Profiles
	i := slices.IndexFunc(profiles, func(p sim.Profile) bool { return strconv.Itoa(p.ID) == name || p.Name == name })
	if i < 0 {
		return sim.Profile{}, nil, &sim.Error{Return: sim.NotFound, Why: "No profile " + name}
	}
	if !placed {
		return profiles[i], nil, nil
	}
	at, err := strconv.Atoi(start)
	if err != nil {
		return sim.Profile{}, nil, &sim.Error{Return: sim.InvalidArgument, Why: "Placement " + start}
	}
	return profiles[i], &gpu.Placement{Start: at, Size: profiles[i].Size}, nil
}

func (s migCommand) destroyCompute() error {
	return s.each("nvmlComputeInstanceDestroy", func(state *simdriver.State, g *sim.GPU) error {
		for _, i := range s.selected(g) {
			for _, c := range slices.Clone(i.Compute) {
				if err := state.Node.DestroyComputeInstance(g.UUID, i.ID, c.ID); err != nil {
					return err
				}
				s.say("Successfully destroyed compute instance ID %2d from GPU %s GPU instance ID %2d", c.ID, busID(g), i.ID)
			}
		}
		return nil
	})
}

func (s migCommand) destroy() error {
	return s.each("nvmlGpuInstanceDestroy", func(state *simdriver.State, g *sim.GPU) error {
		for _, i := range s.selected(g) {
			if err := state.Node.DestroyGPUInstance(g.UUID, i.ID); err != nil {
				return err
			}
			s.say("Successfully destroyed GPU instance ID %2d from GPU %s", i.ID, busID(g))
		}
		return nil
	})
}

// selected lists the GPU instances that -gi names, all without.
func (s migCommand) selected(g *sim.GPU) []sim.GPUInstance {
	ids, given := s.options["-gi"]
	var found []sim.GPUInstance
	for _, i := range g.Instances {
		if !given || slices.Contains(strings.Split(ids, ","), strconv.Itoa(i.ID)) {
			found = append(found, i)
		}
	}
	return found
}
