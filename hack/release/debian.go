// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// debianPackage is a line of hack/release/debian.txt.
type debianPackage struct {
	Arch, Name, Version, SHA256, Path string
}

// readDebian reads hack/release/debian.txt of a source.
func readDebian(folder string) ([]debianPackage, error) {
	data, err := os.ReadFile(filepath.Join(folder, "hack", "release", "debian.txt"))
	if err != nil {
		return nil, fmt.Errorf("reading the list of Debian's packages: %w", err)
	}
	var all []debianPackage
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) != 5 {
			return nil, fmt.Errorf("debian.txt: %q does not have the five fields architecture, name, version, SHA-256 and file", line)
		}
		all = append(all, debianPackage{fields[0], fields[1], fields[2], fields[3], fields[4]})
	}
	return all, nil
}

// of are the packages of an architecture.
func of(packages []debianPackage, arch string) []debianPackage {
	var some []debianPackage
	for _, p := range packages {
		if p.Arch == arch {
			some = append(some, p)
		}
	}
	return some
}

// libc is the version of the C library among packages, such as 2.36.
func libc(packages []debianPackage) string {
	for _, p := range packages {
		if p.Name == "libc6" {
			upstream, _, _ := strings.Cut(p.Version, "-")
			return upstream
		}
	}
	return "0"
}

// unpackDebian unpacks the packages of an architecture into a new folder below another, and returns it.
func unpackDebian(ctx context.Context, source, below, arch string) (string, error) {
	root := filepath.Join(below, "root-"+arch)
	_, err := output(ctx, source, nil, filepath.Join(source, "hack", "release", "debian.sh"), arch, root)
	return root, err
}
