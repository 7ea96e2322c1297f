// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/mod/semver"
)

// readNotes reads the release notes of a version from the CHANGELOG.md of a folder.
func readNotes(folder, version string, unsigned bool) (string, error) {
	changelog, err := os.ReadFile(filepath.Join(folder, "CHANGELOG.md"))
	if err != nil {
		return "", fmt.Errorf("reading the changelog: %w", err)
	}
	return notes(string(changelog), version, unsigned)
}

// notes are the release notes: the section of a version in CHANGELOG.md, which has the format of Keep a Changelog. A
// version between tags, or one before the release, has the section Unreleased, and so has a trial, which nobody signs.
func notes(changelog, version string, unsigned bool) (string, error) {
	number := strings.TrimPrefix(version, "v")
	wanted := []string{"## [" + number + "]", "## " + number}
	if semver.Prerelease(version) != "" || unsigned {
		wanted = append(wanted, "## [Unreleased]", "## Unreleased")
	}
	for _, headline := range wanted {
		var section []string
		inside := false
		for line := range strings.Lines(changelog) {
			line = strings.TrimRight(line, "\n")
			if strings.HasPrefix(line, "## ") {
				inside = line == headline || strings.HasPrefix(line, headline+" ")
				continue
			}
			if inside {
				section = append(section, line)
			}
		}
		if text := strings.TrimSpace(strings.Join(section, "\n")); text != "" {
			return text + "\n", nil
		}
	}
	return "", fmt.Errorf("CHANGELOG.md has no section %q with text; rename the section Unreleased in the commit that gets the tag, "+
		"or make a trial with UNSIGNED=1", wanted[0])
}
