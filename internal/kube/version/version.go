// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package version knows the version and the commit that a program was built from.
package version

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"slices"
)

// version and commit are set by the linker where the build does not see the git repository, as in a container build:
// -ldflags "-X github.com/gpusharing/gpu-sharing-operator/internal/kube/version.version=v1.2.3 -X
// …/version.commit=<commit>".
var version, commit string

// String returns version and commit, such as "v1.2.3 (commit 0123…)". What the linker did not set comes from the build
// information that Go writes into programs: the version from the git tag, and whether files differed from the commit.
func String() string {
	info, found := debug.ReadBuildInfo()
	if !found {
		info = &debug.BuildInfo{}
	}
	return text(version, commit, info)
}

func text(version, commit string, info *debug.BuildInfo) string {
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			commit = cmp.Or(commit, s.Value)
		}
	}
	return fmt.Sprintf("%s (commit %s)", cmp.Or(version, info.Main.Version, "(devel)"), cmp.Or(commit, "unknown"))
}

// Requested reports whether the arguments of a program ask for its version instead of its work.
func Requested(args []string) bool {
	return slices.Contains(args, "--version") || slices.Contains(args, "-version")
}
