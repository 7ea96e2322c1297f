// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

func TestVersionsComeFromTags(t *testing.T) {
	committed := time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC)
	const commit = "0123456789abcdef0123456789abcdef01234567"
	for name, tc := range map[string]struct {
		tags, earlier []string
		version       string
	}{
		"a tag":                          {[]string{"v1.2.3"}, []string{"v1.2.3"}, "v1.2.3"},
		"the highest of several":         {[]string{"v1.2.3-rc.1", "v1.2.3", "latest"}, nil, "v1.2.3"},
		"no version":                     {[]string{"1.2.3", "v1.2", "v1.2.3+metadata"}, nil, "v0.0.0-20261122090000-0123456789ab"},
		"no tag yet":                     {nil, nil, "v0.0.0-20261122090000-0123456789ab"},
		"a commit after a release":       {nil, []string{"v1.2.3", "v1.2.2"}, "v1.2.4-0.20261122090000-0123456789ab"},
		"a commit after a release of v2": {nil, []string{"v1.2.3", "v2.0.0-rc.1"}, "v2.0.0-rc.1.0.20261122090000-0123456789ab"},
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(version(tc.tags, tc.earlier, commit, committed)).To(Equal(tc.version))
		})
	}
}

func TestOnlyACommitIsReleased(t *testing.T) {
	g := NewWithT(t)
	folder, exported := t.TempDir(), t.TempDir()
	git := func(args ...string) {
		_, err := output(t.Context(), folder, []string{"GIT_CONFIG_GLOBAL=/dev/null"}, "git",
			append([]string{"-c", "user.name=x", "-c", "user.email=x@example.com"}, args...)...)
		g.Expect(err).NotTo(HaveOccurred())
	}
	write := func(name, content string) {
		g.Expect(os.WriteFile(filepath.Join(folder, name), []byte(content), 0o600)).To(Succeed())
	}
	write("committed.go", "package x")
	write(".gitignore", "ignored.go")
	git("init", "-q")
	git("add", ".")
	git("commit", "-q", "-m", "x")
	git("tag", "v0.1.0")
	write("ignored.go", "package x")
	s, err := readSource(t.Context(), folder, "")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(s.Version).To(Equal("v0.1.0"))
	git("tag", "v0.1.0-rc.1")
	git("tag", "latest")
	s, err = readSource(t.Context(), folder, "v0.1.0-rc.1")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(s.Version).To(Equal("v0.1.0-rc.1"), "the workflow runs for each tag")
	for _, tag := range []string{"latest", "v0.2.0"} {
		_, err = readSource(t.Context(), folder, tag)
		g.Expect(err).To(MatchError(ContainSubstring("TAG=" + tag + " is no version")))
	}
	g.Expect(s.export(t.Context(), folder, exported)).To(Succeed())
	files, err := readFolder(exported)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(files).To(ConsistOf(HaveField("Path", "committed.go"), HaveField("Path", ".gitignore")))

	write("untracked.go", "package x")
	_, err = readSource(t.Context(), folder, "")
	g.Expect(err).To(MatchError(ContainSubstring("untracked.go")))
}

func TestReleaseNotesAreTheSectionOfTheVersion(t *testing.T) {
	const changelog = "# Changelog\n\n## Unreleased\n\n- new\n\n## [0.2.0] - 2026-11-22\n\n- two\n\n## 0.1.0\n\n- one\n\n### Fixed\n\n- it\n"
	for _, tc := range []struct {
		version, says string
		unsigned      bool
	}{
		{"v0.2.0", "- two\n", false},
		{"v0.1.0", "- one\n\n### Fixed\n\n- it\n", false},
		{"v0.3.0-rc.1", "- new\n", false},
		{"v0.3.0", "- new\n", true},
		{"v0.2.0", "- two\n", true},
	} {
		t.Run(fmt.Sprintf("%s, unsigned %t", tc.version, tc.unsigned), func(t *testing.T) {
			text, err := notes(changelog, tc.version, tc.unsigned)
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Expect(text).To(Equal(tc.says))
		})
	}
	_, err := notes(changelog, "v0.3.0", false)
	NewWithT(t).Expect(err).To(MatchError(ContainSubstring(`CHANGELOG.md has no section "## [0.3.0]"`)))
}

// TestTheLinesOfTheDocsThatPublishWorkAsWritten: one tags the commit that is checked out, whose changelog is this one,
// and releases that; the other publishes it without a tag.
func TestTheLinesOfTheDocsThatPublishWorkAsWritten(t *testing.T) {
	g := NewWithT(t)
	readme, err := os.ReadFile("../../README.md")
	g.Expect(err).NotTo(HaveOccurred())
	publish := regexp.MustCompile(`(?m)^make publish .*$`).Find(readme)
	g.Expect(publish).NotTo(BeEmpty())
	published, err := output(t.Context(), "../..", []string{"MAKEFLAGS=--just-print", "REGISTRY=registry.example.com/x"}, "sh", "-e", "-c", string(publish))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(published).To(ContainSubstring("go run . -local -registry='registry.example.com/x'"))
	contributing, err := os.ReadFile("../../CONTRIBUTING.md")
	g.Expect(err).NotTo(HaveOccurred())
	line := regexp.MustCompile(`(?m)^git tag (v\S+) && (make release .*)$`).FindSubmatch(contributing)
	g.Expect(line).To(HaveLen(3))
	command, err := output(t.Context(), "../..", []string{"MAKEFLAGS=--just-print", "REGISTRY=registry.example.com/x"}, "sh", "-e", "-c", string(line[2]))
	g.Expect(err).NotTo(HaveOccurred())
	_, err = readNotes("../..", string(line[1]), strings.Contains(command, " -unsigned"))
	g.Expect(err).NotTo(HaveOccurred())
}

// TestNotesThatAreMissingAreNoticedBeforeAnythingIsBuilt: a build takes minutes, and what was in dist/ is deleted.
func TestNotesThatAreMissingAreNoticedBeforeAnythingIsBuilt(t *testing.T) {
	g := NewWithT(t)
	folder := t.TempDir()
	// There is no source beside the changelog, so that nothing can be built.
	g.Expect(os.WriteFile(filepath.Join(folder, "CHANGELOG.md"), []byte("# Changelog\n\n## Unreleased\n\n- new\n"), 0o600)).To(Succeed())
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"commit", "-q", "-m", "x"}, {"tag", "v0.1.0"}} {
		_, err := output(t.Context(), folder, nil, "git", append([]string{"-c", "user.name=x", "-c", "user.email=x@example.com"}, args...)...)
		g.Expect(err).NotTo(HaveOccurred())
	}
	set := settings{root: folder, out: filepath.Join(t.TempDir(), "dist")}
	g.Expect(os.Mkdir(set.out, 0o700)).To(Succeed())
	g.Expect(run(t.Context(), set)).To(MatchError(ContainSubstring(`CHANGELOG.md has no section "## [0.1.0]"`)))
	g.Expect(set.out).To(BeADirectory())
	set.unsigned = true
	g.Expect(run(t.Context(), set)).To(MatchError(Not(ContainSubstring("CHANGELOG.md"))), "it comes to what is built")
}
