// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const (
	// Hardware is where the state of the simulated hardware and of the kernel modules lies on the machine. It is
	// visible in every container, as hardware and kernel are, and in every driver's root.
	Hardware = "/var/lib/simdriver"

	// machineRoot is a driver root that nothing but the harness uses: it holds the state.
	machineRoot = "/var/lib/hardware"
)

// Fit puts GPUs into the machine. programs is the folder with the simulated driver's programs.
func Fit(programs string, spec simdriver.Spec) (*simdriver.Driver, error) {
	if err := mountHardware(); err != nil {
		return nil, err
	}
	d, err := simdriver.New(machineRoot, programs, spec)
	if err != nil {
		return nil, err
	}
	if err := showPCI(); err != nil {
		return nil, err
	}
	return d, showKernel()
}

// mountHardware makes a place for the state of the hardware. It stays writable where the driver's root is mounted
// read-only.
func mountHardware() error {
	state := filepath.Join(machineRoot, Hardware)
	for _, path := range append(shown(), Hardware, state) {
		if err := unmountAll(path); err != nil {
			return err
		}
	}
	if err := mountTmpfs(state); err != nil {
		return err
	}
	return bind(state, Hardware, unix.MS_BIND)
}

func shown() []string {
	var paths []string
	for _, to := range KernelSurfaces() {
		paths = append(paths, to)
	}
	return paths
}

// showKernel shows what the driver's modules show below /proc where the kernel does.
func showKernel() error {
	for from, to := range KernelSurfaces() {
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("showing %s: %w", to, err)
		}
	}
	return nil
}

// KernelSurfaces maps files and folders of the hardware to where the kernel shows them in every container.
func KernelSurfaces() map[string]string {
	return map[string]string{
		Hardware + "/proc/devices": "/proc/devices", Hardware + "/proc/driver": "/proc/driver",
	}
}
