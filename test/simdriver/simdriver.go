// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package simdriver makes a driver root without a GPU: libnvidia-ml.so.1 with NVML's C ABI, nvidia-smi and
// nvidia-cuda-mps-control, over the rules of package sim. The agent that ships, and NVIDIA's own programs, work on it
// unmodified.
//
//	<root>/usr/lib64/libnvidia-ml.so.<version>     NVML, with libnvidia-ml.so.1 and libnvidia-ml.so as links to it
//	                                               (from version 615 on another file, which has memory limits)
//	<root>/usr/lib64/libcuda.so.<version>          an empty file that tools look for, with the same links
//	<root>/usr/bin/nvidia-smi                      reset, compute mode, time slice, listings; makes device nodes
//	<root>/usr/bin/nvidia-cuda-mps-control         MPS control daemon and its client
//	<root>/usr/bin/nvidia-persistenced             daemon that has every GPU open
//	<root>/usr/bin/nv-fabricmanager                daemon that has the NVSwitches open
//	<root>/var/lib/simdriver/node.json             the state of the node and of the kernel module
//	                         clients/<pid>-…       a lock for each program that has the driver open
//	                         calls.log             what was changed, by whom, with what outcome
//	                         proc/                 what the kernel module would show in /proc
//	<root>/proc/{devices,modules,driver}           links to that
//	<root>/sys/bus/pci/devices                     what the kernel would show of the GPUs
//
// All programs find the state relative to their own file, also under chroot, and share it under a lock, so that it
// survives them. The folder of the state stands for hardware and kernel: a driver that is installed anew gets it
// mounted. A program that has it open keeps it open when the root is unmounted, as with a kernel module. A person looks
// at and changes it with cmd/simdriver, a test with Driver: processes that hold a GPU, faults, latencies, reboots.
package simdriver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// CountEnv names a file in which the library of NVML writes how often a process has called the driver, whenever the
// process closes it.
const CountEnv = "SIMDRIVER_CALLS"

// Spec says which GPUs a node has, and how its driver is installed.
type Spec struct {
	Name          string // of the node; nodes with different names have GPUs with different UUIDs
	Models        []sim.Model
	DriverVersion string // of the programs and of the kernel module; empty: the version of package sim
	Layout        Layout
}

// Times is a Spec of GPUs of one model.
func Times(name string, model sim.Model, count int) Spec {
	spec := Spec{Name: name}
	for range count {
		spec.Models = append(spec.Models, model)
	}
	return spec
}

// node is the freshly booted node.
func (s Spec) node() (*sim.Node, error) {
	n, err := sim.NewNode(s.Name, s.Models...)
	if err == nil && s.DriverVersion != "" {
		n.DriverVersion = s.DriverVersion
	}
	return n, err
}

// New makes a driver root in a folder that may exist, with a freshly booted node. programs is what Build returned.
func New(root, programs string, spec Spec) (*Driver, error) {
	n, err := spec.node()
	if err != nil {
		return nil, err
	}
	if err := errors.Join(Install(root, programs, n.DriverVersion, spec.Layout), create(root, n)); err != nil {
		return nil, fmt.Errorf("making the driver root %s: %w", root, err)
	}
	return Open(root)
}

// create makes the state of a node, and what the kernel shows of it.
func create(root string, n *sim.Node) error {
	if err := os.MkdirAll(filepath.Join(root, stateFolder), 0o777); err != nil {
		return err
	}
	state, err := os.OpenRoot(filepath.Join(root, stateFolder))
	if err != nil {
		return err
	}
	defer state.Close() //nolint:errcheck // what was written is written
	if err := makeShared(state, "."); err != nil {
		return err
	}
	if err := writePCIDevices(root, n); err != nil {
		return err
	}
	s := &State{Node: *n}
	if err := state.RemoveAll(kernelFolder); err != nil {
		return err
	}
	if err := showKernel(state, nil, kernelFiles(s)); err != nil {
		return err
	}
	return save(state, s)
}

// makeShared makes a folder in that of the state to which every user may write: programs of any user use the GPUs.
func makeShared(state *os.Root, folder string) error {
	if err := state.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	return state.Chmod(folder, 0o777)
}

// Replace puts another node, freshly booted, in place of the one that is there. The library that processes have loaded
// from the root serves the new one, so that a DriverVersion which is given should be the library's.
func (d *Driver) Replace(spec Spec) error {
	n, err := spec.node()
	if err != nil {
		return err
	}
	return d.Update(func(s *State) error {
		*s = State{Node: *n}
		return writePCIDevices(d.root, n)
	})
}
