// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"
)

// gh stands for GitHub's program: it notes its options, and stores each file under its last name, of which a release
// has no two.
const gh = `#!/bin/sh
set -eu
[ "$1 $2" = "release create" ]
tag=$3
shift 3
while [ $# -gt 0 ]; do
	case "$1" in
	--notes-file) [ -f "$2" ]; echo "$1" >>"$OPTIONS"; shift ;;
	--*) echo "$1" >>"$OPTIONS" ;;
	*) [ -f "$1" ] && [ ! -e "$DOWNLOADS/${1##*/}" ] && cp "$1" "$DOWNLOADS/" ;;
	esac
	shift
done
`

// step is the script of the workflow's step that runs a command.
func step(t *testing.T, command string) string {
	t.Helper()
	g := NewWithT(t)
	content, err := os.ReadFile("../../.github/workflows/release.yaml")
	g.Expect(err).NotTo(HaveOccurred())
	var workflow struct {
		Jobs struct {
			Release struct{ Steps []struct{ Run string } }
		}
	}
	g.Expect(yaml.Unmarshal(content, &workflow)).To(Succeed())
	var scripts []string
	for _, s := range workflow.Jobs.Release.Steps {
		if strings.Contains(s.Run, command) {
			scripts = append(scripts, s.Run)
		}
	}
	g.Expect(scripts).To(HaveLen(1))
	return scripts[0]
}

// TestTheWorkflowReleasesTheTagForWhichItRuns: the commit may have another one, which is higher.
func TestTheWorkflowReleasesTheTagForWhichItRuns(t *testing.T) {
	g := NewWithT(t)
	printed, err := output(t.Context(), "../..", []string{"MAKEFLAGS=--just-print", "GITHUB_REF_NAME=v1.2.3-rc.1"}, "sh", "-e", "-c", step(t, "make release"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(printed).To(MatchRegexp(`go run \. .*-tag='v1\.2\.3-rc\.1' .*-keyless`))
}

// uploaded runs the step of the workflow that makes the release on GitHub, in the folder above dist/. It returns the
// folder with what can be downloaded then, and the options of gh.
func uploaded(t *testing.T, folder, tag string) (downloads, options string) {
	t.Helper()
	g := NewWithT(t)
	programs, noted := t.TempDir(), filepath.Join(t.TempDir(), "options")
	downloads = t.TempDir()
	g.Expect(os.WriteFile(filepath.Join(programs, "gh"), []byte(gh), 0o700)).To(Succeed())
	_, err := output(t.Context(), folder, []string{
		"PATH=" + programs + ":" + os.Getenv("PATH"), "GITHUB_REF_NAME=" + tag, "DOWNLOADS=" + downloads, "OPTIONS=" + noted,
	}, "sh", "-e", "-c", step(t, "gh release create"))
	g.Expect(err).NotTo(HaveOccurred())
	content, err := os.ReadFile(noted)
	g.Expect(err).NotTo(HaveOccurred())
	return downloads, string(content)
}

// TestTheSumsOfAReleaseOnGitHubCanBeChecked: of all that is uploaded there, and of nothing else.
func TestTheSumsOfAReleaseOnGitHubCanBeChecked(t *testing.T) {
	g := NewWithT(t)
	r := small(t, "registry.example.com/gpu-sharing")
	g.Expect(r.write(checksums+".sig", []byte("signature"))).To(Succeed())
	downloads, options := uploaded(t, filepath.Dir(r.out), "v1.2.3-rc.1")
	g.Expect(options).To(ContainSubstring("--prerelease"), "it is not the latest release")
	_, err := output(t.Context(), downloads, nil, "sha256sum", "--check", "--strict", "--quiet", checksums)
	g.Expect(err).NotTo(HaveOccurred())

	var files []string
	found, err := os.ReadDir(downloads)
	g.Expect(err).NotTo(HaveOccurred())
	for _, f := range found {
		files = append(files, f.Name())
	}
	var summed []string
	for line := range strings.Lines(string(read(t, r, checksums))) {
		summed = append(summed, strings.Fields(line)[1])
	}
	g.Expect(files).To(ConsistOf(append(summed, checksums, checksums+".sig")))
	g.Expect(summed).To(ContainElements("gpusharing.yaml", "gpu-sharing-agent_linux_arm64.cdx.json", "digests.json", "catalog.yaml", "unlabel.sh"))

	_, options = uploaded(t, filepath.Dir(r.out), "v1.2.3")
	g.Expect(options).NotTo(ContainSubstring("--prerelease"))
}
