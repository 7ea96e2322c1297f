// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package simdriver makes a driver root without a GPU: libnvidia-ml.so.1 with NVML's C ABI, nvidia-smi and
// nvidia-cuda-mps-control, over the rules of package sim. The agent that ships, and NVIDIA's own programs, work on it
// unmodified.
//
//	<root>/usr/lib64/libnvidia-ml.so.1             NVML
//	<root>/usr/bin/nvidia-smi                      reset, compute mode, time slice, listings
//	<root>/usr/bin/nvidia-cuda-mps-control         MPS control daemon and its client
//	<root>/var/lib/simdriver/node.json             the state of the node
//	                         clients/<pid>-…       a lock for each program that has NVML open
//	                         calls.log             what was changed, by whom, with what outcome
//	<root>/sys/bus/pci/devices, <root>/proc/modules  what the kernel would show of the GPUs
//
// All programs find the state relative to their own file and share it under a lock, so that it survives them. A person
// looks at and changes it with cmd/simdriver, a test with Driver: processes that hold a GPU, faults, latencies, reboots.
package simdriver

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
)

// Spec says which GPUs a node has.
type Spec struct {
	Name   string // of the node; nodes with different names have GPUs with different UUIDs
	Models []sim.Model
}

// Times is a Spec of GPUs of one model.
func Times(name string, model sim.Model, count int) Spec {
	spec := Spec{Name: name}
	for range count {
		spec.Models = append(spec.Models, model)
	}
	return spec
}

// New makes a driver root in a folder that may exist, with a freshly booted node. programs is what Build returned.
func New(root, programs string, spec Spec) (*Driver, error) {
	for from, to := range layout() {
		if err := install(filepath.Join(programs, from), filepath.Join(root, to)); err != nil {
			return nil, fmt.Errorf("making the driver root %s: %w", root, err)
		}
	}
	if err := os.MkdirAll(filepath.Join(root, stateFolder), 0o755); err != nil {
		return nil, fmt.Errorf("making the driver root %s: %w", root, err)
	}
	if err := write(root, spec); err != nil {
		return nil, fmt.Errorf("making the driver root %s: %w", root, err)
	}
	return Open(root)
}

func layout() map[string]string {
	return map[string]string{
		library:    "usr/lib64/libnvidia-ml.so.1",
		smi:        "usr/bin/nvidia-smi",
		mpsControl: "usr/bin/nvidia-cuda-mps-control",
	}
}

func write(root string, spec Spec) error {
	n, err := sim.NewNode(spec.Name, spec.Models...)
	if err != nil {
		return err
	}
	if err := writeSurfaces(root, n); err != nil {
		return err
	}
	return save(filepath.Join(root, stateFolder, stateFile), &State{Node: *n})
}

// Replace puts another node, freshly booted, in place of the one that is there. The library that processes have loaded
// from the root serves the new one.
func (d *Driver) Replace(spec Spec) error {
	n, err := sim.NewNode(spec.Name, spec.Models...)
	if err != nil {
		return err
	}
	return d.Update(func(s *State) error {
		*s = State{Node: *n}
		return writeSurfaces(d.root, n)
	})
}

// install copies rather than links, since two roots with one file would be one library to the dynamic linker. A file
// that a process has open is replaced, not written to.
func install(from, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close() //nolint:errcheck // only read
	out, err := os.CreateTemp(filepath.Dir(to), ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name()) //nolint:errcheck // gone after the renaming
	_, err = io.Copy(out, in)
	if err == nil {
		err = out.Chmod(0o755)
	}
	if closed := out.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	return os.Rename(out.Name(), to)
}
