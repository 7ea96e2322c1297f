// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

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

const (
	selinuxFolder  = "/sys/fs/selinux" // there exactly when the kernel runs with SELinux
	selinuxXattr   = "security.selinux"
	containerLabel = "system_u:object_r:container_file_t:s0"
)

// sharedMemory names the tmpfs that this program mounts, in the list of mounts. NVIDIA's programs name theirs shm.
const sharedMemory = "gpu-sharing-shm"

// ownerSuffix ends the name of the file beside shared memory that says who uses it.
const ownerSuffix = ".owner"

// MountSharedMemory makes a folder and mounts a tmpfs of half the machine's memory there, unless a file system is
// mounted there already. A tmpfs of its own keeps what containers put there from filling /run, which the node needs.
// Whatever is mounted, owner is who uses it from now on, and who alone unmounts it.
func MountSharedMemory(folder, owner string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil { //nolint:gosec // clients of any user reach it
		return fmt.Errorf("making the folder of shared memory: %w", err)
	}
	unlock, err := lockFolder(filepath.Dir(folder))
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.WriteFile(folder+ownerSuffix, []byte(owner), 0o600); err != nil {
		return fmt.Errorf("recording who uses the shared memory: %w", err)
	}
	mounted, err := isMountPoint(folder)
	if mounted || err != nil {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_RELATIME
	if err := unix.Mount(sharedMemory, folder, "tmpfs", flags, "size=50%,mode=1777"); err != nil {
		return fmt.Errorf("mounting shared memory on %s: %w", folder, err)
	}
	return nil
}

// UnmountSharedMemory takes away what MountSharedMemory has mounted, unless another owner uses it now. What another
// program has mounted there stays. Containers that have it as their /dev/shm keep it.
func UnmountSharedMemory(folder, owner string) error {
	folder, err := filepath.EvalSymlinks(folder) // the list of mounts has the path without links
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for shared memory: %w", err)
	}
	unlock, err := lockFolder(filepath.Dir(folder))
	if err != nil {
		return err
	}
	defer unlock()
	now, err := os.ReadFile(folder + ownerSuffix)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("looking for the owner of the shared memory: %w", err)
	}
	if err == nil && string(now) != owner {
		return nil
	}
	if err := unmountOwn(folder); err != nil {
		return err
	}
	if err := os.Remove(folder + ownerSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the owner of the shared memory: %w", err)
	}
	return nil
}

// lockFolder keeps other processes that lock a folder waiting.
func lockFolder(folder string) (unlock func(), err error) {
	f, err := os.Open(folder)
	if err != nil {
		return nil, fmt.Errorf("locking: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		_ = f.Close() // only read
		return nil, fmt.Errorf("locking %s: %w", folder, err)
	}
	return func() { _ = f.Close() }, nil
}

// unmountOwn unmounts a folder if the file system there is this program's.
func unmountOwn(folder string) error {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return fmt.Errorf("looking for shared memory: %w", err)
	}
	last := "" // of several mounts on one folder the last counts
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[1] == folder {
			last = fields[0]
		}
	}
	if last != sharedMemory {
		return nil
	}
	if err := unix.Unmount(folder, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmounting shared memory from %s: %w", folder, err)
	}
	return nil
}

// Filled reports whether a file system that is mounted on a folder holds more than a quarter of the bytes or files that it
// can. What is no mount of its own is not filled.
func Filled(folder string) (bool, error) {
	mounted, err := isMountPoint(folder)
	if !mounted || err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return false, err
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(folder, &stat); err != nil {
		return false, fmt.Errorf("looking how much %s holds: %w", folder, err)
	}
	return stat.Blocks-stat.Bfree > stat.Blocks/4 || stat.Files-stat.Ffree > stat.Files/4, nil
}

// isMountPoint reports whether a folder is on another file system than the folder above it.
func isMountPoint(folder string) (bool, error) {
	var here, above unix.Stat_t
	if err := unix.Stat(folder, &here); err != nil {
		return false, fmt.Errorf("looking at %s: %w", folder, err)
	}
	if err := unix.Stat(filepath.Dir(folder), &above); err != nil {
		return false, fmt.Errorf("looking at %s: %w", filepath.Dir(folder), err)
	}
	return here.Dev != above.Dev, nil
}

// LabelForContainers gives a folder, and what is in it, the SELinux type of files that every container may use. What is
// made there later inherits it. Where the kernel runs without SELinux there is nothing to do. Folders in which
// containers themselves write, which are other file systems and those named so, are labelled without what is in them:
// it has inherited the type, and a link in the place of a folder would lead to any file of the node.
func LabelForContainers(folder string, written ...string) error {
	if _, err := os.Stat(selinuxFolder); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return fmt.Errorf("labelling %s: %w", folder, err)
		}
		err = unix.Lsetxattr(path, selinuxXattr, []byte(containerLabel), 0)
		if err != nil && !errors.Is(err, unix.ENOTSUP) {
			return fmt.Errorf("labelling %s for containers: %w", path, err)
		}
		if !entry.IsDir() || path == folder {
			return nil
		}
		mounted, err := isMountPoint(path)
		if err == nil && (mounted || slices.Contains(written, entry.Name())) {
			return fs.SkipDir
		}
		return err
	})
}
