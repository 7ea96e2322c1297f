// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// chosen lists the GPUs that -i names by index, UUID or PCI address, separated by commas; all without -i.
func (s smi) chosen(state *simdriver.State) ([]*sim.GPU, error) {
	var found []*sim.GPU
	ids, given := s.options["-i"]
	for i := range state.Node.GPUs {
		if g := &state.Node.GPUs[i]; !given || named(ids, i, g) {
			found = append(found, g)
		}
	}
	if len(found) == 0 {
		return nil, &sim.Error{Return: sim.NotFound, Why: fmt.Sprintf("No devices were found for %q", ids)}
	}
	return found, nil
}

func named(ids string, index int, g *sim.GPU) bool {
	return slices.ContainsFunc(strings.Split(ids, ","), func(id string) bool {
		id = strings.TrimSpace(id)
		return id == strconv.Itoa(index) || id == g.UUID || strings.EqualFold(id, g.PCIBusID) || strings.EqualFold(id, busID(g))
	})
}

// busID is a PCI address as nvidia-smi prints it.
func busID(g *sim.GPU) string { return strings.ToUpper("0000" + g.PCIBusID) }

// each changes the chosen GPUs one after the other, after the fault that the call may have.
func (s smi) each(call string, change func(state *simdriver.State, g *sim.GPU) error) error {
	state, err := s.driver.Read()
	if err != nil {
		return err
	}
	gpus, err := s.chosen(state)
	if err != nil {
		return err
	}
	var errs []error
	for _, g := range gpus {
		uuid := g.UUID
		err := s.meet(call, uuid)
		if err == nil {
			err = s.driver.WithClients(func(state *simdriver.State) error {
				g, err := state.Node.GPU(uuid)
				if err != nil {
					return err
				}
				return change(state, g)
			})
		}
		s.driver.Record("nvidia-smi", call, uuid, outcome(err))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (s smi) meet(call, uuid string) error {
	fault, latency, err := s.driver.Take(call, uuid)
	time.Sleep(latency + fault.Hang)
	if err == nil && fault.Return != sim.Success {
		err = &sim.Error{Return: fault.Return, Why: "GPU " + uuid}
	}
	return err
}

func outcome(err error) string {
	var refusal *sim.Error
	switch {
	case err == nil:
		return sim.Success.String()
	case errors.As(err, &refusal):
		return refusal.Return.String()
	}
	return sim.Unknown.String()
}

func (s smi) computeMode() error {
	modes := map[string]gpu.ComputeMode{
		"0": gpu.ComputeDefault, "DEFAULT": gpu.ComputeDefault, "2": gpu.ComputeProhibited, "PROHIBITED": gpu.ComputeProhibited,
		"3": gpu.ComputeExclusiveProcess, "EXCLUSIVE_PROCESS": gpu.ComputeExclusiveProcess,
	}
	mode, ok := modes[s.options["-c"]]
	if !ok {
		return &sim.Error{Return: sim.InvalidArgument, Why: "\"" + s.options["-c"] + "\" is no compute mode"}
	}
	err := s.each("nvmlDeviceSetComputeMode", func(state *simdriver.State, g *sim.GPU) error {
		if err := state.Node.SetComputeMode(g.UUID, mode); err != nil {
			return fmt.Errorf("unable to set the compute mode for GPU %s: %w", busID(g), err)
		}
		s.say("Set compute mode to %s for GPU %s.", mode, busID(g))
		return nil
	})
	return s.finished(err)
}

func (s smi) finished(err error) error {
	if err == nil {
		s.say("All done.")
	}
	return err
}

func (s smi) migMode() error {
	enabled, ok := onOff(s.options["-mig"])
	if !ok {
		return &sim.Error{Return: sim.InvalidArgument, Why: "\"" + s.options["-mig"] + "\" is no MIG mode"}
	}
	word := map[bool]string{true: "Enabled", false: "Disabled"}[enabled]
	err := s.each("nvmlDeviceSetMigMode", func(state *simdriver.State, g *sim.GPU) error {
		activation, err := state.Node.SetMIG(g.UUID, enabled, os.Getpid())
		switch {
		case err != nil:
			return fmt.Errorf("unable to set the MIG mode for GPU %s: %w", busID(g), err)
		case activation != sim.Success:
			s.say("Warning: MIG mode is in pending %s state for GPU %s:%s", strings.ToLower(strings.TrimSuffix(word, "d")), busID(g), words(activation))
		default:
			s.say("%s MIG Mode for GPU %s", word, busID(g))
		}
		return nil
	})
	return s.finished(err)
}

func onOff(value string) (on, ok bool) {
	switch strings.ToUpper(value) {
	case "1", "ENABLED":
		return true, true
	case "0", "DISABLED":
		return false, true
	}
	return false, false
}

// computePolicy sets or lists time slices.
func (s smi) computePolicy() error {
	value, set := s.options["--set-timeslice"]
	if !set {
		return s.listTimeSlices()
	}
	number, err := strconv.Atoi(value)
	if err != nil || number < 0 || number >= len(gpu.TimeSlices()) {
		return &sim.Error{Return: sim.InvalidArgument, Why: "\"" + value + "\" is no time slice"}
	}
	slice := gpu.TimeSlices()[number]
	err = s.each("nvidia-smi compute-policy", func(state *simdriver.State, g *sim.GPU) error {
		err := state.Node.SetTimeSlice(g.UUID, slice)
		if refusal, refused := errors.AsType[*sim.Error](err); refused {
			refusal.Why = fmt.Sprintf("Failed to set timeslice policy with value %s for GPU %d ", slice, indexOf(state, g))
		}
		return err
	})
	if refusal, refused := errors.AsType[*sim.Error](err); refused {
		s.say("%s", said(refusal))
		return &sim.Error{Return: refusal.Return, Why: "Failed to set timeslice for requested devices "}
	}
	return s.finished(err)
}

// listTimeSlices prints a table. NVIDIA documents no format of it, so this one is a guess.
func (s smi) listTimeSlices() error {
	const line = "+---------------------------------------------+"
	s.say("%s\n| GPU compute policies:                       |\n| GPU     Policy                    Value     |", line)
	s.say("%s", strings.ReplaceAll(line, "-", "="))
	err := s.show(func(state *simdriver.State, index int, g *sim.GPU) {
		value := "N/A"
		if slice, err := state.Node.TimeSlice(g.UUID); err == nil {
			value = string(slice)
		}
		s.say("| %3d     %-25s %-9s |", index, "Timeslice", value)
	})
	s.say("%s", line)
	return err
}

func indexOf(state *simdriver.State, g *sim.GPU) int {
	return slices.IndexFunc(state.Node.GPUs, func(o sim.GPU) bool { return o.UUID == g.UUID })
}
