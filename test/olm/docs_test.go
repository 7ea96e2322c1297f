// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/olm"
)

// TestEveryBlockAboutOLMIsRun: each block of commands of docs/install.md about OLM, by its headline and number, is one that
// the tests of this package ask for.
func TestEveryBlockAboutOLMIsRun(t *testing.T) {
	g := NewWithT(t)
	root, err := env.Root()
	g.Expect(err).NotTo(HaveOccurred())
	page, err := os.ReadFile(filepath.Join(root, "docs", "install.md"))
	g.Expect(err).NotTo(HaveOccurred())
	const first = "## With the Operator Lifecycle Manager\n"
	g.Expect(string(page)).To(ContainSubstring(first))
	var blocks []string
	_, section, _ := strings.Cut(string(page), first)
	for i, part := range regexp.MustCompile(`(?m)^#+ `).Split(first[3:]+section, -1) {
		headline, text, _ := strings.Cut(part, "\n")
		g.Expect(strings.Count(text, "\n```")%2).To(BeZero(), headline)
		for n := range strings.Count(text, "\n```") / 2 {
			blocks = append(blocks, fmt.Sprintf("documented(%q, %d)", headline, n+1))
		}
		g.Expect(i).To(BeNumerically("<", 5), "a headline that is not about OLM: "+headline)
	}
	files, err := filepath.Glob("*_test.go")
	g.Expect(err).NotTo(HaveOccurred())
	var asked []string
	for _, file := range files {
		source, err := os.ReadFile(file)
		g.Expect(err).NotTo(HaveOccurred())
		asked = append(asked, regexp.MustCompile(`documented\("[^"]+", \d\)`).FindAllString(string(source), -1)...)
	}
	slices.Sort(asked)
	slices.Sort(blocks)
	g.Expect(slices.Compact(asked)).To(Equal(blocks))
}

// snapshot is every object of the cluster.
func (s *site) snapshot() map[string]string {
	s.t.Helper()
	all, err := olm.Snapshot(s.t.Context(), s.cluster.Config)
	s.Expect(err).NotTo(HaveOccurred())
	return all
}

// sinceThen are the differences from a snapshot.
func (s *site) sinceThen(before map[string]string) func() []string {
	return func() []string { s.t.Helper(); return olm.Differences(before, s.snapshot()) }
}

// documented is the n-th block of commands, from 1, below a headline of docs/install.md.
func (s *site) documented(headline string, n int) string {
	s.t.Helper()
	commands, err := olm.Documented(headline, n)
	s.Expect(err).NotTo(HaveOccurred())
	return commands
}

// do runs commands as an administrator, who is in the folder of the release.
func (s *site) do(commands string) string {
	s.t.Helper()
	out, err := s.try(commands)
	s.Expect(err).NotTo(HaveOccurred(), "%s\n%s", commands, out)
	return out
}

func (s *site) try(commands string) (string, error) {
	s.t.Helper()
	root, err := env.Root()
	s.Expect(err).NotTo(HaveOccurred())
	assets, err := env.Assets(s.t.Context())
	s.Expect(err).NotTo(HaveOccurred())
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*wait)
	defer cancel()
	shell := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	shell.Dir = s.released
	shell.Env = []string{
		"PATH=" + strings.Join([]string{s.bin, assets, filepath.Join(root, "hack", "install"), os.Getenv("PATH")}, ":"), "HOME=" + s.dir,
		"KUBECONFIG=" + s.kubeconfig, "REGISTRY=" + s.registry,
	}
	out, err := shell.CombinedOutput()
	return string(out), err
}
