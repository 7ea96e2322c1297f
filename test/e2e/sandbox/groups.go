// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// cgroupRoot is where control groups are mounted, on this machine and in the one inside.
const cgroupRoot = "/sys/fs/cgroup"

// hierarchy is a tree of control groups: one for each controller (version 1), or one for all of them (version 2).
type hierarchy struct {
	// mount is the folder below cgroupRoot; empty for version 2 alone.
	mount string
	// path is the group of this process, below the mount.
	path string
	// options are those that mount it again.
	options string
}

// hierarchies finds those that are mounted here.
func hierarchies() ([]hierarchy, error) {
	f, err := os.Open("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("reading the control groups of this process: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	var found []hierarchy
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.SplitN(s.Text(), ":", 3)
		if len(fields) != 3 {
			continue
		}
		h := hierarchy{mount: strings.TrimPrefix(fields[1], "name="), path: fields[2], options: fields[1]}
		if isFolder(filepath.Join(cgroupRoot, h.mount)) && h.mount != "" {
			found = append(found, h)
		}
	}
	if len(found) == 0 {
		return nil, errors.New("no control groups of version 1 are mounted below " + cgroupRoot +
			"; version 2 alone is not supported by this sandbox yet")
	}
	return found, nil
}

func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// groups are the machine's control groups, and where this process was before it entered them.
type groups struct {
	before []hierarchy
}

// enterGroups makes a control group of the machine's in each hierarchy, below the one in which this process is, and
// enters it, so that the machine, whose root group it is, never reaches beyond.
func enterGroups(dir string) (*groups, error) {
	found, err := hierarchies()
	if err != nil {
		return nil, err
	}
	for _, h := range found {
		group := filepath.Join(cgroupRoot, h.mount, h.path, filepath.Base(dir))
		if err := os.Mkdir(group, 0o755); err != nil {
			return nil, fmt.Errorf("making a control group: %w", err)
		}
		if h.mount == "cpuset" {
			if err := inheritCPUs(group); err != nil {
				return nil, err
			}
		}
		if err := enter(group); err != nil {
			return nil, err
		}
	}
	return &groups{before: found}, nil
}

// inheritCPUs gives a new group the processors and memory of its parent: a group without any takes no process.
func inheritCPUs(group string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(filepath.Dir(group), file))
		if err == nil {
			err = os.WriteFile(filepath.Join(group, file), value, 0o644)
		}
		if err != nil {
			return fmt.Errorf("giving a control group its processors: %w", err)
		}
	}
	return nil
}

func enter(group string) error {
	if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
		return fmt.Errorf("entering a control group: %w", err)
	}
	return nil
}

// leave takes this process back to where it was, so that the machine's groups can be removed.
func (g *groups) leave() error {
	var errs []error
	for _, h := range g.before {
		errs = append(errs, enter(filepath.Join(cgroupRoot, h.mount, h.path)))
	}
	return errors.Join(errs...)
}

// killGroups kills every process in the machine's control groups and reports whether there was any.
func killGroups(name string) bool {
	found := false
	walkGroups(name, func(group string) {
		data, err := os.ReadFile(filepath.Join(group, "cgroup.procs"))
		if err != nil {
			return // it went in the meantime
		}
		for field := range strings.FieldsSeq(string(data)) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 1 && pid != os.Getpid() {
				found = true
				_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended by itself
			}
		}
	})
	return found
}

// removeGroups removes the machine's control groups, innermost first.
func removeGroups(name string) error {
	var all []string
	walkGroups(name, func(group string) { all = append(all, group) })
	for _, group := range slices.Backward(all) {
		if err := os.Remove(group); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing a control group: %w", err)
		}
	}
	return nil
}

// walkGroups visits the machine's control groups in all hierarchies, outermost first.
func walkGroups(name string, visit func(group string)) {
	found, err := hierarchies()
	if err != nil {
		return // without hierarchies there was no machine
	}
	for _, h := range found {
		top := filepath.Join(cgroupRoot, h.mount, h.path, name)
		_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				visit(path)
			}
			return nil // groups come and go while they are walked
		})
	}
}
