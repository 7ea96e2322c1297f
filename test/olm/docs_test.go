// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
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
