// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mount is one file system of the machine.
type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return fmt.Errorf("making the mount point %s: %w", m.target, err)
	}
	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", m.kind, m.target, err)
	}
	return nil
}

// inMemory are the folders of the machine that are file systems of their own: containerd cannot lay an overlay over an
// overlay, and the others start out empty on a machine that boots.
func inMemory() []string {
	return []string{"/run", "/tmp", "/var/lib/containerd", "/var/lib/kubelet", "/var/lib/etcd", "/var/log"}
}

// hidden reports whether a path lies below one of the folders that start out empty: a checkout in /tmp does.
func hidden(path string) bool {
	return slices.ContainsFunc(inMemory(), func(folder string) bool { return strings.HasPrefix(path, folder+"/") })
}

// mountRoot makes an overlay over the real root, whose writes go to memory, the root of this mount namespace.
func mountRoot(dir string, o Options) error {
	groups, err := hierarchies()
	if err != nil {
		return err
	}
	root := filepath.Join(dir, "root")
	upper, work := filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	mounts := []mount{
		{source: "none", target: "/", flags: unix.MS_REC | unix.MS_PRIVATE},
		{source: "tmpfs", target: dir, kind: "tmpfs", data: "mode=755"},
	}
	if err := doAll(mounts); err != nil {
		return err
	}
	for _, d := range []string{upper, work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return fmt.Errorf("making the machine's root: %w", err)
		}
	}
	overlay := fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", upper, work)
	if err := (mount{source: "overlay", target: root, kind: "overlay", data: overlay}).do(); err != nil {
		return err
	}
	if err := doAll(below(root, groups)); err != nil {
		return err
	}
	if err := fillDevices(filepath.Join(root, "dev")); err != nil {
		return err
	}
	if err := bindAll(root, o); err != nil {
		return err
	}
	return pivot(root)
}

// below lists what is mounted below the machine's root.
func below(root string, groups []hierarchy) []mount {
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	mounts := []mount{
		{source: "proc", target: root + "/proc", kind: "proc", flags: quiet},
		{source: "sysfs", target: root + "/sys", kind: "sysfs", flags: quiet},
		{source: "tmpfs", target: root + cgroupRoot, kind: "tmpfs", flags: quiet, data: "mode=755"},
		{source: "tmpfs", target: root + "/dev", kind: "tmpfs", flags: unix.MS_NOSUID, data: "mode=755"},
		{source: "devpts", target: root + "/dev/pts", kind: "devpts", data: "newinstance,ptmxmode=0666,mode=620"},
		{source: "tmpfs", target: root + "/dev/shm", kind: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV},
	}
	for _, h := range groups {
		mounts = append(mounts, mount{source: "cgroup", target: filepath.Join(root+cgroupRoot, h.mount), kind: "cgroup", flags: quiet, data: h.options})
	}
	for _, path := range inMemory() {
		mounts = append(mounts, mount{source: "tmpfs", target: root + path, kind: "tmpfs", data: "mode=755"})
	}
	return mounts
}

func doAll(mounts []mount) error {
	for _, m := range mounts {
		if err := m.do(); err != nil {
			return err
		}
	}
	return nil
}

// device is a file in /dev.
type device struct {
	name         string
	major, minor uint32
}

// fillDevices makes the devices that every Linux machine has. The machine has a /dev of its own, so that the device
// files of simulated GPUs never appear in the real one.
func fillDevices(dev string) error {
	devices := []device{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"kmsg", 1, 11}, {"tty", 5, 0}}
	for _, d := range devices {
		path := filepath.Join(dev, d.name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("making the device %s: %w", d.name, err)
		}
		if err := os.Chmod(path, 0o666); err != nil { // the umask took some of it
			return fmt.Errorf("making the device %s: %w", d.name, err)
		}
	}
	links := map[string]string{"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil {
			return fmt.Errorf("making the device %s: %w", name, err)
		}
	}
	return nil
}

// bindAll shows the machine the folders that it must see, read-only, and the one to which it writes.
func bindAll(root string, o Options) error {
	for _, path := range o.Visible {
		resolved, err := filepath.EvalSymlinks(path)
		if err != nil {
			return fmt.Errorf("showing the machine a folder: %w", err)
		}
		if err := bind(root, resolved); err != nil {
			return err
		}
		flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY)
		if err := (mount{target: root + resolved, flags: flags}).do(); err != nil {
			return err
		}
	}
	if o.Kept == "" {
		return nil
	}
	return bind(root, o.Kept)
}

func bind(root, path string) error {
	return mount{source: path, target: root + path, flags: unix.MS_BIND | unix.MS_REC}.do()
}

// pivot makes a folder the root of this mount namespace, forgets the old root, and shares what is mounted from now on
// with the namespaces made from this one, as a kubelet needs for the mounts that pods make for others.
func pivot(root string) error {
	if err := os.Chdir(root); err != nil {
		return fmt.Errorf("entering the machine's root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("making the machine's root the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forgetting the real root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("entering the machine's root: %w", err)
	}
	return mount{source: "none", target: "/", flags: unix.MS_REC | unix.MS_SHARED}.do()
}
