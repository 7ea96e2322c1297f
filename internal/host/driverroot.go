// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"path/filepath"
	"strings"
)

// DriverRoot is the folder in which the NVIDIA driver is installed as if it were the root of a file system: "/" for a
// driver on the host, /run/nvidia/driver for the GPU Operator's driver container.
type DriverRoot string

// Program is the path of one of the driver's programs.
func (r DriverRoot) Program(name string) string {
	return filepath.Join(string(r), "usr", "bin", name)
}

// Env is what the environment of the driver's programs needs so that they find the driver's libraries, and each other,
// under the root: nothing for "/". It is an environment rather than a change of root, for a driver root may hold nothing
// but the driver; the programs need no more than a glibc beside it.
func (r DriverRoot) Env() []string {
	if filepath.Clean(string(r)) == "/" {
		return nil
	}
	libraries := []string{"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib64", "usr/lib", "lib"}
	for i := range libraries {
		libraries[i] = filepath.Join(string(r), libraries[i])
	}
	return []string{
		"LD_LIBRARY_PATH=" + strings.Join(libraries, ":"),
		"PATH=" + filepath.Join(string(r), "usr", "bin") + ":/usr/bin:/bin",
	}
}
