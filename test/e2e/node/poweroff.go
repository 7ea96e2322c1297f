// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// offAfter is how long it may take until all that was killed has ended and let go of what it had. On an idle machine it
// takes a moment; this is for one that is not.
const offAfter = 2 * time.Minute

// persist tries something that asks for patience until it succeeds or its time is up, and then says why it did not.
func persist(try func() error) error {
	deadline := time.Now().Add(offAfter)
	for {
		err := try()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(poll)
	}
}

// killOthers kills every process of the machine that is not spared, until there is none.
func killOthers(spared []int) error {
	return persist(func() error {
		found, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return fmt.Errorf("listing processes: %w", err)
		}
		var left []int
		for _, path := range found {
			pid, err := strconv.Atoi(filepath.Base(path))
			if err != nil || slices.Contains(spared, pid) || hasEnded(pid) {
				continue
			}
			left = append(left, pid)
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended by itself
		}
		if len(left) > 0 {
			return fmt.Errorf("killed and still there: %s", describe(left))
		}
		return nil
	})
}

// removeGroups removes the control groups of pods: a kubelet that finds those of containers that are gone takes seconds
// for each. A process that was killed keeps its groups busy until it has let go of all that it had.
func removeGroups() error {
	return persist(func() error {
		tops, err := filepath.Glob("/sys/fs/cgroup/*/kubepods")
		if err != nil {
			return fmt.Errorf("listing control groups: %w", err)
		}
		var errs []error
		for _, top := range tops {
			errs = append(errs, removeTree(top))
		}
		return errors.Join(errs...)
	})
}

// removeTree removes a control group with all below it, innermost first, and names who is in one that stays.
func removeTree(top string) error {
	var groups []string
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			groups = append(groups, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // groups come and go while they are walked
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("listing control groups: %w", err)
	}
	for _, group := range slices.Backward(groups) {
		if err := os.Remove(group); err != nil && !errors.Is(err, fs.ErrNotExist) {
			inside := members(group)
			for _, pid := range inside {
				_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended by itself
			}
			return fmt.Errorf("removing a control group: %w; in it: %s", err, describe(inside))
		}
	}
	return nil
}

// members are the processes in a control group itself.
func members(group string) []int {
	raw, _ := os.ReadFile(filepath.Join(group, "cgroup.procs")) // it may be gone
	var pids []int
	for field := range strings.FieldsSeq(string(raw)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 1 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// describe names processes, with the state that the kernel says they are in.
func describe(pids []int) string {
	if len(pids) == 0 {
		return "no process"
	}
	var each []string
	for _, pid := range pids {
		name, state := stat(pid)
		each = append(each, fmt.Sprintf("%d %s (%s)", pid, name, state))
	}
	return strings.Join(each, ", ")
}

// hasEnded reports whether a process is gone, or has ended and waits for its parent.
func hasEnded(pid int) bool {
	_, state := stat(pid)
	return state == "" || state == "Z" || state == "X"
}

// stat is the name of a process and the letter of its state, both empty if there is none.
func stat(pid int) (name, state string) {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)) // it may be gone
	_, rest, _ := strings.Cut(string(raw), " (")
	end := strings.LastIndex(rest, ") ")
	if end < 0 {
		return "", ""
	}
	state, _, _ = strings.Cut(rest[end+2:], " ")
	return rest[:end], state
}

// forget unmounts what is mounted in a folder, innermost first, and empties it. The folder itself may be a mount and
// stays.
func forget(folder string) error {
	mounts, err := mountPoints()
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(mounts) {
		if !strings.HasPrefix(m, folder+"/") {
			continue
		}
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmounting %s: %w", m, err)
		}
	}
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("emptying %s: %w", folder, err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(folder, e.Name())); err != nil {
			return fmt.Errorf("emptying %s: %w", folder, err)
		}
	}
	return nil
}

// mountPoints lists where file systems are mounted, in the order in which they were.
func mountPoints() ([]string, error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("listing mounts: %w", err)
	}
	var points []string
	for line := range strings.Lines(string(raw)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			points = append(points, fields[4])
		}
	}
	return points, nil
}
