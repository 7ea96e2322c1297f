// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nvidia-container-runtime stands for NVIDIA's container toolkit: a container that asks for a driver through
// NVIDIA_VISIBLE_DEVICES gets the files of the driver root, as if its image had them; all the rest is runc's.
//
// It injects what NVIDIA's toolkit injects and the simulated driver has: the library, nvidia-smi, the MPS control
// program, and /proc/driver with the minor numbers of MIG capabilities. The simulated driver's state comes along.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/oci"
)

const (
	// driver is the root of the driver on the node.
	driver = "/run/nvidia/driver"
	// procDriver is what the kernel module of a real driver would show below /proc/driver.
	procDriver = driver + "/proc/driver"
	// hookArgument makes this program the hook that mounts procDriver.
	hookArgument = "mount-proc-driver"
)

// injected maps files of the driver root to where containers look for them.
func injected() map[string]string {
	return map[string]string{
		"usr/lib64/libnvidia-ml.so.1":     "/usr/lib/libnvidia-ml.so.1",
		"usr/bin/nvidia-smi":              "/usr/bin/nvidia-smi",
		"usr/bin/nvidia-cuda-mps-control": "/usr/bin/nvidia-cuda-mps-control",
		"var/lib/simdriver":               "/var/lib/simdriver",
	}
}

func main() {
	err := run(os.Args)
	fmt.Fprintln(os.Stderr, "nvidia-container-runtime:", err)
	os.Exit(1)
}

// run ends only with an error, or by becoming runc.
func run(args []string) error {
	if len(args) == 2 && args[1] == hookArgument {
		if err := mountProcDriver(); err != nil {
			return err
		}
		os.Exit(0)
	}
	return oci.Become(args, addDriver)
}

// addDriver adds the driver to a container's configuration, as far as the container asks for one.
func addDriver(c oci.Config) error {
	if !asksForDriver(c) {
		return nil
	}
	for from, to := range injected() {
		c.AddMount(filepath.Join(driver, from), to)
	}
	return c.AddHook(hookArgument)
}

// asksForDriver says whether NVIDIA_VISIBLE_DEVICES names any device.
func asksForDriver(c oci.Config) bool {
	process, _ := c["process"].(map[string]any)
	asks := false
	for _, e := range oci.List(process["env"]) {
		if value, ok := strings.CutPrefix(fmt.Sprint(e), "NVIDIA_VISIBLE_DEVICES="); ok {
			asks = value != "" && value != "void" && value != "none" // the last one counts
		}
	}
	return asks
}

// mountProcDriver mounts what the kernel module would show, if it is there.
func mountProcDriver() error {
	if _, err := os.Stat(procDriver); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return oci.Mount(os.Stdin, procDriver, "/proc/driver")
}
