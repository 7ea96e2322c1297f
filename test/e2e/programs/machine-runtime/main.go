// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command machine-runtime is runc on a machine inside a machine: a container sees what the kernel of the machine in
// which it runs would show. That is the boot id, which does not change for the kernel below when that machine boots;
// and, where the machine has GPUs, the hardware and what the driver's modules show below /proc.
package main

import (
	"fmt"
	"os"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/oci"
)

const (
	// bootID is what the kernel shows, and in this machine what it has mounted there.
	bootID = "/proc/sys/kernel/random/boot_id"
	// hookArgument makes this program the hook that mounts it.
	hookArgument = "show-kernel"
)

func main() {
	err := run(os.Args)
	fmt.Fprintln(os.Stderr, "machine-runtime:", err)
	os.Exit(1)
}

// run ends only with an error, or by becoming runc.
func run(args []string) error {
	if len(args) == 2 && args[1] == hookArgument {
		if err := showKernel(); err != nil {
			return err
		}
		os.Exit(0)
	}
	return oci.Become("runc", args, amend)
}

// amend lets a container see the kernel and the hardware of this machine.
func amend(c oci.Config) error {
	if hasGPUs() {
		c.AddMount(driver.Hardware, driver.Hardware)
	}
	return c.AddHook(hookArgument)
}

func showKernel() error {
	shown := map[string]string{bootID: bootID}
	if hasGPUs() {
		for from, to := range driver.KernelSurfaces() {
			shown[to] = from
		}
	}
	return oci.Mount(os.Stdin, shown)
}

// hasGPUs reports whether GPUs were put into the machine.
func hasGPUs() bool {
	_, err := os.Stat(driver.Hardware + "/proc/driver")
	return err == nil
}
