// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strings"
)

// provenance is the predicate of SLSA v1 (https://slsa.dev/spec/v1.0/provenance): from which commit, with which
// packages, Go and C compilers everything was built. It is the same for each artifact of a release.
func provenance(ctx context.Context, s source, registry string, packages []debianPackage) ([]byte, error) {
	type digests map[string]string
	dependencies := []map[string]any{{"uri": "git+" + repository + "@refs/tags/" + s.Version, "digest": digests{"gitCommit": s.Commit}}}
	for _, p := range packages {
		dependencies = append(dependencies, map[string]any{
			"uri":    fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", p.Name, p.Version, p.Arch),
			"digest": digests{"sha256": p.SHA256},
		})
	}
	used := map[string]string{"go": runtime.Version()}
	for _, arch := range nodes() {
		says, err := output(ctx, "", nil, compiler(arch), "--version")
		if err != nil {
			return nil, err
		}
		used[compiler(arch)], _, _ = strings.Cut(says, "\n")
	}
	// The workflow names itself; anybody else's machine is not named.
	builder := os.Getenv("BUILDER_ID")
	if builder == "" {
		builder = repository + "/blob/main/Makefile#release"
	}
	return json.MarshalIndent(map[string]any{
		"buildDefinition": map[string]any{
			"buildType":            repository + "/tree/main/hack/release",
			"externalParameters":   map[string]string{"repository": repository, "version": s.Version, "registry": registry},
			"internalParameters":   used,
			"resolvedDependencies": dependencies,
		},
		"runDetails": map[string]any{"builder": map[string]string{"id": builder}},
	}, "", "  ")
}
