// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Device is a character device: the numbers by which the kernel knows it, and who may open its node.
type Device struct {
	Major, Minor uint32
	Mode         fs.FileMode // permission bits
}

// DeviceAt returns the character device whose node is at a path. It reports false if there is no such node.
func DeviceAt(path string) (Device, bool) {
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFCHR {
		return Device{}, false
	}
	return Device{
		Major: unix.Major(stat.Rdev), Minor: unix.Minor(stat.Rdev), Mode: fs.FileMode(stat.Mode) & fs.ModePerm,
	}, true
}

// MakeDevice makes the node of a character device, and the folders above it. A node that is there with other numbers is
// replaced.
func MakeDevice(path string, d Device) error {
	if there, ok := DeviceAt(path); ok {
		if there == d {
			return nil
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("replacing a device node: %w", err)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // as the folders of /dev are
		return fmt.Errorf("making the folder of a device node: %w", err)
	}
	err := unix.Mknod(path, unix.S_IFCHR|uint32(d.Mode.Perm()), int(unix.Mkdev(d.Major, d.Minor)))
	if err != nil {
		return fmt.Errorf("making the device node %s: %w", path, err)
	}
	if err := os.Chmod(path, d.Mode.Perm()); err != nil { // mknod obeys the umask
		return fmt.Errorf("making the device node %s: %w", path, err)
	}
	return nil
}

// FileID identifies a file as long as something holds it open: the file system and the number of the file in it.
type FileID struct{ Device, Inode uint64 }

// IDOf returns the identity of the file or folder at a path, links followed.
func IDOf(path string) (FileID, error) {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return FileID{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return FileID{Device: stat.Dev, Inode: stat.Ino}, nil
}

// CanChangeRoot reports whether programs can be run in another root: only root may do that.
func CanChangeRoot() bool { return os.Geteuid() == 0 }

// Link makes a symbolic link, in place of another link or a missing one. It leaves alone what is no link.
func Link(target, path string) error {
	if now, err := os.Readlink(path); err == nil {
		if now == target {
			return nil
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("replacing a link: %w", err)
		}
	}
	if err := os.Symlink(target, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("making a link: %w", err)
	}
	return nil
}
