// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sandbox runs a Go program in a machine of its own inside this one: own processes, mounts, network, devices
// and control groups, so that a kubelet and a containerd can run as they do anywhere, under their usual paths, and
// nothing of them remains, also when everything is killed with SIGKILL at once.
//
// The program starts itself again, stage by stage:
//
//	outer   what the user started: makes the control groups, starts sweep and init, passes signals on
//	sweep   outlives outer: when outer is gone, however it went, kills what is left and removes control groups and folder
//	init    process 1 of the machine: mounts its root, brings its network up, starts inside, reaps orphans
//	inside  the caller's function
//
// All processes of the machine die with init, and init dies with outer. Mounts and network die with the last process
// that uses them. The machine's root is an overlay over the real one whose writes go to memory, so no file survives.
package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// stageVariable tells a process which stage it is.
const stageVariable = "GPUSHARING_SANDBOX_STAGE"

// The stages after the first, whose name is empty.
const (
	stageSweep  = "sweep"
	stageInit   = "init"
	stageInside = "inside"
)

// Options say what the machine is.
type Options struct {
	// Hostname of the machine.
	Hostname string
	// Addresses are IPv4 addresses of the machine besides 127.0.0.1. They are bound to the loopback interface: the
	// machine has no way out.
	Addresses []string
	// Visible are folders that the machine must see. Most are visible anyway; this is for those that lie on another
	// file system than the root.
	Visible []string
	// Kept is a folder to which the machine writes what must outlive it, such as logs. Empty: none.
	Kept string
}

// Main runs inside in a machine of its own and returns its exit status. It must be called early and by the main
// function (or TestMain), since every stage comes by here.
func Main(o Options, inside func() int) int {
	var status int
	var err error
	switch stage := os.Getenv(stageVariable); stage {
	case stageInside:
		return inside()
	case stageInit:
		status, err = boot(o)
	case stageSweep:
		err = sweep(os.Getenv(boxVariable))
	default:
		status, err = outer()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandbox:", err)
		return 1
	}
	return status
}

// self is this program again, at another stage. It is found through /proc, since the machine does not see /tmp, where
// `go test` puts the programs that it builds.
func self(stage string) *exec.Cmd {
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: os.Args, Env: environment(stage)}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	return cmd
}

func environment(stage string) []string {
	kept := []string{stageVariable + "=" + stage}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, stageVariable+"=") {
			kept = append(kept, v)
		}
	}
	return kept
}
