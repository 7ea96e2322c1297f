// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// Device is a character device file of the driver.
type Device struct {
	// Path below /dev.
	Path         string
	Major, Minor uint32
}

// Controls are the device files that every program on a GPU gets.
func Controls() []Device {
	return []Device{
		{"nvidiactl", simdriver.MajorGPU, 255},
		modeset(),
		{"nvidia-uvm", simdriver.MajorUVM, 0},
		{"nvidia-uvm-tools", simdriver.MajorUVM, 1},
	}
}

func modeset() Device { return Device{"nvidia-modeset", simdriver.MajorGPU, 254} }

// GPU is the device file of a GPU.
func GPU(minor int) Device {
	return Device{fmt.Sprintf("nvidia%d", minor), simdriver.MajorGPU, uint32(minor)}
}

// Cap is the device file of a capability.
func Cap(minor int) Device {
	return Device{fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor), simdriver.MajorCaps, uint32(minor)}
}

// makeDevices makes the device files that a driver container has once it has started, by nvidia-smi in the driver's
// root, as the container's startup probe does. Those of MIG instances are among them if the instances exist: the kernel
// makes none.
func (d *Driver) makeDevices() error {
	// What a container runtime gives every container, and what nvidia-modprobe makes.
	made := []Device{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}, modeset()}
	for _, one := range made {
		if err := one.make(filepath.Join("/", d.own, "dev")); err != nil {
			return err
		}
	}
	if err := d.SMI(); err != nil {
		return fmt.Errorf("making device files: %w", err)
	}
	return nil
}

// SMI runs nvidia-smi in the driver's root, as an administrator does in the driver container.
func (d *Driver) SMI(args ...string) error {
	if out, err := d.command("/usr/bin/nvidia-smi", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("nvidia-smi %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// command is a program in the driver's root.
func (d *Driver) command(program string, args ...string) *exec.Cmd {
	c := exec.Command(program, args...)
	c.Dir = "/"
	if d.own != "" {
		c.SysProcAttr = &syscall.SysProcAttr{Chroot: d.own}
	}
	return c
}

func (d Device) make(dev string) error {
	path := filepath.Join(dev, d.Path)
	err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(d.Major, d.Minor)))
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		err = os.Chmod(path, 0o666) // the umask took some of it
	}
	if err != nil {
		return fmt.Errorf("making the device file %s: %w", path, err)
	}
	return nil
}

// removeDevices removes the device files of the driver, and no others.
func removeDevices(dev string) error {
	entries, err := os.ReadDir(dev)
	if err != nil {
		return fmt.Errorf("removing device files: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "nvidia") {
			errs = append(errs, os.RemoveAll(filepath.Join(dev, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// pciBus is where the kernel lists what is on the PCI bus.
const pciBus = "/sys/bus/pci"

// showPCI puts the simulated GPUs on the machine's PCI bus, on which Node Feature Discovery looks for them. The folder
// above the devices is mounted, because other GPUs replace the folder of the devices.
func showPCI() error {
	from := filepath.Join(machineRoot, pciBus)
	if err := os.MkdirAll(from, 0o755); err != nil {
		return fmt.Errorf("making the PCI bus: %w", err)
	}
	// The one of a machine that was there before is gone.
	if err := unix.Unmount(pciBus, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmounting the PCI bus: %w", err)
	}
	if err := unix.Mount(from, pciBus, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting the PCI bus: %w", err)
	}
	return nil
}

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
