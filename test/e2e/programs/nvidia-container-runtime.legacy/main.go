// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nvidia-container-runtime.legacy stands for the legacy mode of NVIDIA's container toolkit, whose part in C has
// no Go module: a container that asks for a driver through NVIDIA_VISIBLE_DEVICES gets the files of the driver root, as
// if its image had them. As that part does, it first makes the device files of all MIG instances that exist, in the
// driver root (NVIDIA/libnvidia-container src/nvc.c, mig_nvcaps_mknodes).
//
// It gives containers all device files, which only NVIDIA's own pods may open, since they are privileged. Users' pods
// do not come by here: they get what the device plugin lists by PASS_DEVICE_SPECS.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/oci"
)

// injected maps files of the driver root to where containers look for them.
func injected() map[string]string {
	return map[string]string{
		"usr/lib64/libnvidia-ml.so.1":     "/usr/lib/libnvidia-ml.so.1",
		"usr/bin/nvidia-smi":              "/usr/bin/nvidia-smi",
		"usr/bin/nvidia-cuda-mps-control": "/usr/bin/nvidia-cuda-mps-control",
	}
}

func main() {
	err := run(os.Args)
	fmt.Fprintln(os.Stderr, "nvidia-container-runtime.legacy:", err)
	os.Exit(1)
}

// run ends only with an error, or by becoming the machine's runc, which lies beside it.
func run(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	return oci.Become(filepath.Join(filepath.Dir(self), "machine-runtime"), args, addDriver)
}

// addDriver adds the driver to a container's configuration, as far as the container asks for one.
func addDriver(c oci.Config) error {
	if !requestsDriver(c) {
		return nil
	}
	if err := makeCapabilities(); err != nil {
		return err
	}
	for from, to := range injected() {
		c.AddMount(filepath.Join(driver.Root, from), to)
	}
	devices, err := filepath.Glob(driver.Root + "/dev/nvidia*")
	for _, device := range devices {
		c.AddMount(device, strings.TrimPrefix(device, driver.Root))
	}
	return err
}

// makeCapabilities makes the device files of all MIG instances that exist, in the driver root: nvidia-smi has the same
// code.
func makeCapabilities() error {
	smi := exec.Command("/usr/bin/nvidia-smi", "-L")
	smi.Dir, smi.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: driver.Root}
	if out, err := smi.CombinedOutput(); err != nil {
		return fmt.Errorf("making the device files of MIG instances: %w: %s", err, out)
	}
	return nil
}

// requestsDriver reports whether NVIDIA_VISIBLE_DEVICES names any device.
func requestsDriver(c oci.Config) bool {
	process, _ := c["process"].(map[string]any)
	asks := false
	for _, e := range oci.List(process["env"]) {
		if value, ok := strings.CutPrefix(fmt.Sprint(e), "NVIDIA_VISIBLE_DEVICES="); ok {
			asks = value != "" && value != "void" && value != "none" // the last one counts
		}
	}
	return asks
}
