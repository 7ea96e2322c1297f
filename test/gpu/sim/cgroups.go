// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Cgroups is what charges the GPU memory of cgroups, and where they are. Without a back end nothing is charged.
type Cgroups struct {
	Backend         Backend
	Root            string         // of the hierarchy; empty: /sys/fs/cgroup
	File            string         // that a directory with files of the controller has; empty: the controller's own, such as dmem.max
	Members         map[int]string // paths of the cgroups of CUDA programs, in place of /proc/<pid>/cgroup
	AppliesBelowUse bool           // on dmem a newer kernel applies a limit that is below use
}

func (c Cgroups) none() bool { return c.Backend == "" || c.Backend == NoBackend }

// cgroup is a directory of the hierarchy.
type cgroup struct {
	id, path string
	files    bool // its parent enables the controller, so that it has files of it
}

// find lists a cgroup and its ancestors, without the root.
func (c Cgroups) find(path string) ([]cgroup, error) {
	root, err := filepath.EvalSymlinks(cmp.Or(c.Root, "/sys/fs/cgroup"))
	if err != nil {
		return nil, err
	}
	path, err = filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	var chain []cgroup
	for ; path != root; path = filepath.Dir(path) {
		if !strings.HasPrefix(path, root+"/") {
			return nil, fmt.Errorf("%s is no cgroup below %s", path, root)
		}
		id, err := identity(path)
		if err != nil {
			return nil, err
		}
		_, missing := os.Stat(filepath.Join(path, cmp.Or(c.File, string(c.Backend)+".max")))
		chain = append(chain, cgroup{id, path, missing == nil})
	}
	return chain, nil
}

// withFiles leaves out the cgroups below the one that is charged.
func withFiles(chain []cgroup) []cgroup {
	for len(chain) > 0 && !chain[0].files {
		chain = chain[1:]
	}
	return chain
}

// identity tells a directory from another that has its path later. Cgroups have inodes that are given out once; other
// file systems tell by a handle.
func identity(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if !info.IsDir() {
		return "", fmt.Errorf("%s is no directory", path)
	}
	handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, path, 0)
	if err != nil {
		return "", fmt.Errorf("asking for the handle of %s: %w", path, err)
	}
	return fmt.Sprintf("%x", handle.Bytes()), nil
}
