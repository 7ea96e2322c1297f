// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package driver installs the simulated driver on the node as the GPU Operator installs NVIDIA's: as the root file
// system of a container that is bind-mounted at /run/nvidia/driver, with the device files of GPUs in its own /dev and
// the sockets of its daemons in its own /run, or on the node itself. It installs NVIDIA's container toolkit beside it,
// and writes the files by which NVIDIA's pods see that both are there. It mounts and writes all over the machine, so it
// belongs inside a sandbox.
//
// The hardware is not part of the driver: its state, and what the kernel shows of it, survive every driver.
package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// Layout is where a driver lies.
type Layout int

const (
	// Container is a driver container, the default of the GPU Operator.
	Container Layout = iota
	// Host is a driver on the node itself, in /usr/lib64 and /usr/bin, with its device files in the node's /dev.
	Host
	// Debian is a driver on the node as Debian's packages lay it out: behind the links of update-alternatives.
	Debian
)

const (
	// Root is where a driver container mounts its root file system.
	Root = "/run/nvidia/driver"
	// Version is that of the first driver.
	Version = "595.45.04"

	validations = "/run/nvidia/validations"
	driverReady = validations + "/driver-ready"
	// containerReady is the driver container's own: its startup probe makes it, and the preStop hook of its pod removes
	// it (NVIDIA/gpu-operator assets/state-driver).
	containerReady = validations + "/.driver-ctr-ready"
	// containers holds the root file systems of driver containers.
	containers = "/var/lib/driver-container"
)

// started counts the driver containers, each of which has a root file system of its own.
var started atomic.Int64

// Options say which driver the node gets.
type Options struct {
	// Programs is the folder with the simulated driver's programs and libraries.
	Programs string
	Layout   Layout
	Version  string
	// FabricManager reports whether the fabric manager runs, as on machines with NVSwitches.
	FabricManager bool
}

// Driver is the driver that the node has.
type Driver struct {
	Options
	// own is the root file system of the driver container. Empty: the driver is on the node.
	own     string
	daemons []*daemon
}

// Start installs a driver, makes the device files of the GPUs that the machine has, starts the driver's daemons, and
// then shows the driver to the node, in the order in which NVIDIA's driver container does it.
func Start(o Options) (*Driver, error) {
	d := &Driver{Options: o}
	if err := d.start(); err != nil {
		return nil, fmt.Errorf("starting driver %s: %w", o.Version, errors.Join(err, d.Stop()))
	}
	return d, nil
}

func (d *Driver) start() error {
	if d.Layout == Container {
		if err := d.makeRoot(); err != nil {
			return err
		}
	}
	if err := d.loadModule(); err != nil {
		return err
	}
	if err := simdriver.Install("/"+d.own, d.Programs, d.Version, d.files()); err != nil {
		return err
	}
	if err := d.makeDevices(); err != nil {
		return err
	}
	if err := d.startDaemons(); err != nil {
		return err
	}
	if d.Layout == Container {
		if err := bind(d.own, Root, unix.MS_BIND|unix.MS_REC); err != nil {
			return err
		}
	}
	return d.mark()
}

// Stop takes the driver away as a driver container does that ends: the file that says that it is ready first, then its
// mount, even if a program still uses it.
func (d *Driver) Stop() error {
	err := errors.Join(d.PreStop(), remove(driverReady), d.stopDaemons())
	if d.Layout == Container {
		return errors.Join(err, d.Unmount())
	}
	return errors.Join(err, removeDevices("/dev"), d.removeFiles())
}

// files is where the files of the driver lie in its root.
func (d *Driver) files() simdriver.Layout {
	if d.Layout == Debian {
		return simdriver.Alternatives
	}
	return simdriver.RPM
}

// removeFiles removes the files of a driver on the node.
func (d *Driver) removeFiles() error {
	var errs []error
	for _, pattern := range []string{
		"/usr/lib64/libnvidia-ml.so*", "/usr/lib64/libcuda.so*", "/usr/lib/*/libnvidia-ml.so*", "/usr/lib/*/libcuda.so*",
		"/usr/lib/*/nvidia/current", "/usr/lib/nvidia/current", "/usr/bin/nvidia-*", "/etc/alternatives/nvidia--*",
	} {
		found, err := filepath.Glob(pattern)
		errs = append(errs, err)
		for _, f := range found {
			errs = append(errs, os.RemoveAll(f))
		}
	}
	return errors.Join(errs...)
}

// Replace stops the driver and starts another version in the same layout: a driver upgrade, or, with the same version,
// the restart of a driver container.
func (d *Driver) Replace(version string) (*Driver, error) {
	if err := d.Stop(); err != nil {
		return nil, err
	}
	next := d.Options
	next.Version = version
	return Start(next)
}

// makeRoot makes the root file system of a driver container: a file system of its own, with a second one on /dev, the
// kernel's on /proc, and the hardware.
func (d *Driver) makeRoot() error {
	d.own = fmt.Sprintf("%s/%d", containers, started.Add(1))
	if err := mountTmpfs(d.own); err != nil {
		return err
	}
	// What is unmounted at Root must not be unmounted here.
	if err := unix.Mount("", d.own, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making the mount %s private: %w", d.own, err)
	}
	for _, folder := range []string{"run", "etc", "tmp", "var"} {
		if err := os.MkdirAll(filepath.Join(d.own, folder), 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink("../run", filepath.Join(d.own, "var/run")); err != nil {
		return err
	}
	if err := mountTmpfs(filepath.Join(d.own, "dev")); err != nil {
		return err
	}
	if err := bind("/proc", filepath.Join(d.own, "proc"), unix.MS_BIND|unix.MS_REC); err != nil {
		return err
	}
	if err := bind(Hardware, filepath.Join(d.own, Hardware), unix.MS_BIND); err != nil {
		return err
	}
	if err := unix.Mount("", d.own, "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("making the mount %s private: %w", d.own, err)
	}
	return nil
}

// loadModule loads the kernel module of the driver's version.
func (d *Driver) loadModule() error {
	hardware, err := simdriver.Open(machineRoot)
	if err != nil {
		return err
	}
	return hardware.LoadModule(d.Version)
}

// mark says that the driver container is ready, as its startup probe does, and then where the driver is, as the GPU
// Operator's validator does once it has found it.
func (d *Driver) mark() error {
	host, root, seen := "false", Root, "/driver-root"
	if d.Layout != Container {
		host, root, seen = "true", "/", "/host"
	} else if err := write(containerReady, "GDRCOPY_ENABLED: false\nGDS_ENABLED: false\nGPU_DIRECT_RDMA_ENABLED: false\n"); err != nil {
		return err
	}
	return write(driverReady, fmt.Sprintf("IS_HOST_DRIVER=%s\nNVIDIA_DRIVER_ROOT=%s\nDRIVER_ROOT_CTR_PATH=%s\n"+
		"NVIDIA_DEV_ROOT=%[2]s\nDEV_ROOT_CTR_PATH=%[3]s\n", host, root, seen))
}

// Root is the driver's root on the node.
func (d *Driver) Root() string {
	if d.Layout == Container {
		return Root
	}
	return "/"
}

func mountTmpfs(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return fmt.Errorf("making the mount point %s: %w", path, err)
	}
	if err := unix.Mount("tmpfs", path, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mounting %s: %w", path, err)
	}
	return nil
}

func bind(from, to string, flags uintptr) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return fmt.Errorf("making the mount point %s: %w", to, err)
	}
	if err := unix.Mount(from, to, "", flags, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", to, err)
	}
	return nil
}

// unmountAll is `umount -l -R`.
func unmountAll(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, fs.ErrNotExist) { // nothing is mounted there any more
			return nil
		}
		if err != nil {
			return fmt.Errorf("unmounting %s: %w", path, err)
		}
	}
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

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing a file of the driver: %w", err)
	}
	return nil
}
