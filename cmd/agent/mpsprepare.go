// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
)

// runMPSPrepare makes the MPS root ready for daemons and clients, as the first container of NVIDIA's MPS pod does: with
// shared memory of its own, which the device plugin gives to clients as their /dev/shm, and with an SELinux type that
// they may use.
func runMPSPrepare(args []string) error {
	var f hostFlags
	set := flag.NewFlagSet("agent mps-prepare", flag.ContinueOnError)
	f.bind(set)
	if err := f.parse(set, args); err != nil {
		return err
	}
	pod, err := podName()
	if err != nil {
		return err
	}
	if err := host.MountSharedMemory(f.sharedMemory(), pod); err != nil {
		return err
	}
	return host.LabelForContainers(f.mpsRoot, mps.PipeFolder)
}
