// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package host is the node beside its GPUs: programs that are run, processes, the boot, device nodes. One
// small interface for each need, its Linux version beside it and its fake in test/host/fake; only this package
// imports os/exec and syscall.
package host

import "context"

// Command is a program to run: no shell, arguments are a slice.
type Command struct {
	Path string
	// Root is the folder that the program sees as the root of its file system; Path is a path in it. Empty: our own
	// root.
	Root  string
	Args  []string
	Env   []string // the whole environment
	Stdin string
	// Daemon says that the program leaves a daemon behind, which may keep the program's output open: the end of the
	// program is the end of the run, and what it writes is shown only if it fails.
	Daemon bool
}

// Runner runs programs.
type Runner interface {
	// Run runs a program to its end and returns what it wrote to stdout. A program that ends with another status than 0
	// is an error that names the program, the status and the end of its stderr, or of its stdout if stderr is empty, as
	// NVIDIA's programs do it. When the context ends, the program is killed with all that it started.
	Run(ctx context.Context, c Command) (stdout string, err error)
}

// Process is what the kernel says about a process: whose it is, apart from its name.
type Process struct {
	// Name is what the process calls itself, for people to read. It proves nothing: see Runs.
	Name string
	// PodUID and ContainerID are those of the cgroup that the kubelet has made for it. Empty outside pods.
	PodUID, ContainerID string
	// HostPIDs reports that it is in the host's PID namespace: a process of the node, or of a pod with hostPID, which Pod
	// Security denies tenants from "baseline" on. NVIDIA's programs for MPS must be there.
	HostPIDs bool
}

// Runs reports whether a process that no tenant started runs a program, such as one of NVIDIA's for MPS.
func (p Process) Runs(program string) bool { return p.HostPIDs && p.Name == program }

// Processes tells about processes.
type Processes interface {
	// Describe tells about one process; a process that is gone is described by zero values.
	Describe(pid int) Process
}

// Boot tells one boot of the node from another.
type Boot interface {
	// ID is the kernel's boot id.
	ID() (string, error)
}

// Rebooter reboots the node.
type Rebooter interface {
	// Able says why the node cannot, or must not, be rebooted from here, and what to do about it; nil: it can.
	Able() error
	// Reboot asks for it and returns at once: the node goes down in its own order, and this program with it. Asking
	// again meanwhile changes nothing.
	Reboot() error
}
