// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package version

import (
	"runtime/debug"
	"testing"

	. "github.com/onsi/gomega"
)

func TestVersionAndCommitComeFromTheLinkerThenFromGo(t *testing.T) {
	stamped := &debug.BuildInfo{
		Main:     debug.Module{Version: "v0.2.1-0.20261122090000-0123456789ab"},
		Settings: []debug.BuildSetting{{Key: "vcs", Value: "git"}, {Key: "vcs.revision", Value: "0123456789abcdef"}},
	}
	for name, tc := range map[string]struct {
		version, commit string
		info            *debug.BuildInfo
		says            string
	}{
		"a release":                    {"v1.2.3", "fedcba", stamped, "v1.2.3 (commit fedcba)"},
		"a build in the repository":    {"", "", stamped, "v0.2.1-0.20261122090000-0123456789ab (commit 0123456789abcdef)"},
		"a build without a repository": {"", "", &debug.BuildInfo{}, "(devel) (commit unknown)"},
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(text(tc.version, tc.commit, tc.info)).To(Equal(tc.says))
		})
	}
}
