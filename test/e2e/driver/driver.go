// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package driver installs the simulated driver on the node as the GPU Operator installs NVIDIA's: a driver root in
// /run/nvidia/driver, device files, and the marks by which NVIDIA's pods see that driver and container toolkit are
// there. It writes below /run and /dev, so it belongs inside a sandbox.
package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const (
	// Root is the driver root.
	Root = "/run/nvidia/driver"

	state       = Root + "/var/lib/simdriver"
	validations = "/run/nvidia/validations"
	procDriver  = Root + "/proc/driver"
	devices     = "/dev"

	// majorGPU is the real driver's; majorCaps is one that is free.
	majorGPU, majorCaps = 195, 241
	// maxGPUs, maxInstances and maxCompute bound the device files that are made at once, as the real driver does.
	maxGPUs, maxInstances, maxCompute = 4, 15, 8
)

// Install installs a driver whose programs lie in a folder, on a node that has these GPUs.
func Install(programs string, spec simdriver.Spec) (*simdriver.Driver, error) {
	if err := mountState(); err != nil {
		return nil, err
	}
	d, err := simdriver.New(Root, programs, spec)
	if err != nil {
		return nil, err
	}
	if err := showPCI(); err != nil {
		return nil, err
	}
	if err := makeDevices(); err != nil {
		return nil, err
	}
	if err := makeProc(); err != nil {
		return nil, err
	}
	return d, mark()
}

// mountState makes the folder of the simulated driver's state a file system of its own: pods mount the driver root
// read-only, as that of a real driver, whose state is hardware. It stays writable below a read-only mount.
func mountState() error {
	if err := os.MkdirAll(state, 0o755); err != nil {
		return fmt.Errorf("making the folder of the driver's state: %w", err)
	}
	if err := unix.Mount("tmpfs", state, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mounting the folder of the driver's state: %w", err)
	}
	return nil
}

// mark says that driver and toolkit are ready, as the GPU Operator's validator does.
func mark() error {
	files := map[string]string{
		"driver-ready":  "IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\nDRIVER_ROOT_CTR_PATH=/driver-root\nNVIDIA_DEV_ROOT=/\nDEV_ROOT_CTR_PATH=/host\n",
		"toolkit-ready": "",
	}
	for name, content := range files {
		if err := write(filepath.Join(validations, name), content); err != nil {
			return err
		}
	}
	return nil
}

// makeDevices makes the device files that the kernel module of a real driver makes.
func makeDevices() error {
	wanted := map[string]uint64{
		"nvidiactl": unix.Mkdev(majorGPU, 255), "nvidia-modeset": unix.Mkdev(majorGPU, 254),
		"nvidia-uvm": unix.Mkdev(majorCaps-1, 0), "nvidia-uvm-tools": unix.Mkdev(majorCaps-1, 1),
	}
	for i := range maxGPUs {
		wanted[fmt.Sprintf("nvidia%d", i)] = unix.Mkdev(majorGPU, uint32(i))
	}
	for _, c := range capabilities() {
		wanted[fmt.Sprintf("nvidia-caps/nvidia-cap%d", c.minor)] = unix.Mkdev(majorCaps, c.minor)
	}
	if err := os.MkdirAll(filepath.Join(devices, "nvidia-caps"), 0o755); err != nil {
		return fmt.Errorf("making device files: %w", err)
	}
	for name, number := range wanted {
		err := unix.Mknod(filepath.Join(devices, name), unix.S_IFCHR|0o666, int(number))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("making the device file %s: %w", name, err)
		}
	}
	return nil
}

// capability is a right that the driver of MIG-capable GPUs hands out as a device file.
type capability struct {
	name  string
	minor uint32
}

// capabilities are those of all instances that any GPU could have.
func capabilities() []capability {
	all := []capability{{"config", 1}, {"monitor", 2}}
	add := func(format string, args ...any) {
		all = append(all, capability{fmt.Sprintf(format, args...), uint32(len(all) + 1)})
	}
	for gpu := range maxGPUs {
		for gi := range maxInstances {
			add("gpu%d/gi%d/access", gpu, gi)
			for ci := range maxCompute {
				add("gpu%d/gi%d/ci%d/access", gpu, gi, ci)
			}
		}
	}
	return all
}

// makeProc makes what the container runtime shows as /proc/driver.
func makeProc() error {
	var minors strings.Builder
	for _, c := range capabilities() {
		fmt.Fprintf(&minors, "%s %d\n", c.name, c.minor)
	}
	return write(filepath.Join(procDriver, "nvidia-caps/mig-minors"), minors.String())
}

func write(path, content string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("installing the driver: %w", err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		return fmt.Errorf("installing the driver: %w", err)
	}
	return nil
}
