// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mps runs NVIDIA's MPS control daemons as NVIDIA's own MPS DaemonSet does, with the same programs, paths,
// limits and markers, so that NVIDIA's device plugin cannot tell one from the other.
//
// It has three parts. Control starts, limits, asks and ends one daemon. Host is the MPS pod: it keeps the daemons as
// the agent asks. View is the agent's side: it writes the desired state and sees the daemons by asking them. They meet
// in the MPS root, which is /run/nvidia/mps on a node:
//
//	gpusharing/<resource, with _ for />.json  the desired state for a daemon; none: it must not run            View writes
//	<resource>/.gpusharing.json               the record of the daemon: what was applied, what failed  Host writes
//	<resource>/pipe, <resource>/log           pipe and log directory                                   Host makes
//	<resource>/.started                       the daemon runs with its limits                          Host writes
//	.ready                                    all desired daemons run                                  Host writes
//	shm                                       /dev/shm of all clients                                  the MPS pod mounts
//	shm.owner                                 the MPS pod that uses shm                                the MPS pod writes
//
// A resource has a slash, so its directory is nested: nvidia.com/gpu/pipe. A daemon that answers but has no record is
// NVIDIA's and is never touched. The agent is never the parent of a daemon, since clients die with it.
//
// Daemons run for all GPUs of a node: the device plugin knows one daemon for each resource. Limits are set for each GPU
// by its NVML index, since the daemon takes no UUID there. A daemon starts a server with its first client and gives it
// the limits of that moment. So new limits are set for the daemon and for each of its servers; clients that are
// connected keep theirs. The MPS pod mounts shm, and on a node with SELinux gives the MPS root the type container_file_t, which
// all that is made in it inherits, before any daemon runs: that is `agent mps-prepare`.
package mps

import (
	"errors"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// ErrDaemon is wrapped by what goes wrong with a daemon.
var ErrDaemon = errors.New("MPS control daemon")

// recordedError is an error about a daemon that another process has put into words.
type recordedError string

func (e recordedError) Error() string { return string(e) }
func (e recordedError) Unwrap() error { return ErrDaemon }

// Serving is a daemon that answers.
type Serving struct {
	// Daemon is what was applied to it. Of an external one only the resource and the percentage are known.
	plan.Daemon
	// External marks a daemon that we did not start: that of NVIDIA's MPS DaemonSet.
	External bool
	// Use is how the MPS pod last saw it used. Not known of an external one.
	Use Use
	// Failing says that the MPS pod has recorded an error of it. Set by Recorded only.
	Failing bool
}
