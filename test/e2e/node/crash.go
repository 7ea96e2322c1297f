// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
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

// Crash ends everything that runs on the node at once, as a power failure does, but for the control plane, which is
// somewhere else in a real cluster. What was in memory is gone: mounts of pods, state of containers. The caller reboots
// the hardware and calls Boot.
func (n *Node) Crash() error {
	spared := []int{1, os.Getpid()}
	var stays []*program
	for _, p := range n.programs {
		if p.name != "kubelet" && p.name != "containerd" {
			spared = append(spared, p.cmd.Process.Pid)
			stays = append(stays, p)
		}
	}
	n.programs = stays
	if err := killOthers(spared); err != nil {
		return err
	}
	if err := forget("/run/containerd", "/run/netns", "/run/nvidia/mps", "/var/lib/kubelet/pods"); err != nil {
		return err
	}
	return removeGroups()
}

// removeGroups removes the control groups of pods: a kubelet that finds those of containers that are gone takes seconds
// for each. A process that was killed keeps its groups busy until it has let go of all that it had.
func removeGroups() error {
	deadline := time.Now().Add(stopAfter)
	for {
		err := tryRemoveGroups()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(poll)
	}
}

func tryRemoveGroups() error {
	tops, err := filepath.Glob("/sys/fs/cgroup/*/kubepods")
	if err != nil {
		return fmt.Errorf("listing control groups: %w", err)
	}
	for _, top := range tops {
		var groups []string
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				groups = append(groups, path)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("listing control groups: %w", err)
		}
		for _, group := range slices.Backward(groups) {
			if err := os.Remove(group); err != nil {
				return fmt.Errorf("removing control groups: %w", err)
			}
		}
	}
	return nil
}

// Boot starts containerd and kubelet after a crash and waits until the node is Ready.
func (n *Node) Boot(ctx context.Context) error {
	containerd, err := n.run("containerd", containerdArguments()...)
	if err != nil {
		return err
	}
	if err := n.waitFor(ctx, containerd, "containerd", n.containerdAnswers); err != nil {
		return err
	}
	if err := n.startKubelet(); err != nil {
		return err
	}
	return n.waitFor(ctx, n.kubelet, "the node to be Ready", n.ready)
}

// killOthers kills every process of the machine that is not spared, until there is none.
func killOthers(spared []int) error {
	for {
		found, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return fmt.Errorf("listing processes: %w", err)
		}
		killed := false
		for _, path := range found {
			pid, err := strconv.Atoi(filepath.Base(path))
			if err != nil || slices.Contains(spared, pid) || isZombie(path) {
				continue
			}
			killed = true
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("killing process %d: %w", pid, err)
			}
		}
		if !killed {
			return nil
		}
		time.Sleep(poll)
	}
}

// isZombie says whether a process has ended and waits for its parent, or is gone.
func isZombie(path string) bool {
	stat, err := os.ReadFile(filepath.Join(path, "stat"))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "Z") || strings.HasPrefix(rest, "X")
}

// forget unmounts what is mounted in folders, innermost first, and empties them.
func forget(folders ...string) error {
	mounts, err := mountPoints()
	if err != nil {
		return err
	}
	for _, folder := range folders {
		for _, m := range slices.Backward(mounts) {
			if !strings.HasPrefix(m, folder+"/") {
				continue
			}
			if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
				return fmt.Errorf("unmounting %s: %w", m, err)
			}
		}
		if err := os.RemoveAll(folder); err != nil {
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
