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
// but the driver; the programs need no more than a glibc beside it. That one is looked for in our own file system first: a
// driver root may hold another, of another version, and a program whose loader and C library differ does not start.
func (r DriverRoot) Env() []string {
	if filepath.Clean(string(r)) == "/" {
		return nil
	}
	libraries := []string{
		"/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
	}
	for _, folder := range []string{"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib64", "usr/lib", "lib"} {
		libraries = append(libraries, filepath.Join(string(r), folder))
	}
	return []string{
		"LD_LIBRARY_PATH=" + strings.Join(libraries, ":"),
		"PATH=" + filepath.Join(string(r), "usr", "bin") + ":/usr/bin:/bin",
	}
}
