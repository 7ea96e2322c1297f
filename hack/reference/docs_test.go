// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// TestLinksOfDocsLeadSomewhere follows the links of all pages within the repository, down to their headings.
func TestLinksOfDocsLeadSomewhere(t *testing.T) {
	t.Chdir("../..")
	var pages []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/dev/*.md"} {
		found, err := filepath.Glob(pattern)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		pages = append(pages, found...)
	}
	code, link := regexp.MustCompile("`[^`]*`"), regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for _, page := range pages {
		text, err := os.ReadFile(page)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		for _, match := range link.FindAllStringSubmatch(code.ReplaceAllString(string(text), ""), -1) {
			to, heading, _ := strings.Cut(match[1], "#")
			if strings.Contains(to, "://") {
				continue
			}
			target := page
			if to != "" {
				target = filepath.Join(filepath.Dir(page), to)
			}
			info, err := os.Stat(target)
			if err != nil {
				t.Errorf("%s: %s leads nowhere", page, match[1])
				continue
			}
			if heading != "" && (info.IsDir() || !headings(t, target)[heading]) {
				t.Errorf("%s: %s has no such heading", page, match[1])
			}
		}
	}
}

// TestTestsThatDocsNameExist: what the pages for maintainers name as shown is shown by a test of that name.
func TestTestsThatDocsNameExist(t *testing.T) {
	t.Chdir("../..")
	g, declared := NewWithT(t), map[string]bool{}
	g.Expect(filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if path == "bin" {
			return filepath.SkipDir
		}
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, match := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(source, -1) {
			declared[string(match[1])] = true
		}
		return err
	})).To(Succeed())
	pages, err := filepath.Glob("docs/dev/*.md")
	g.Expect(err).NotTo(HaveOccurred())
	for _, page := range append(pages, "docs/architecture.md") {
		text, err := os.ReadFile(page)
		g.Expect(err).NotTo(HaveOccurred())
		for _, match := range regexp.MustCompile("`(Test[A-Z]\\w+)`").FindAllStringSubmatch(string(text), -1) {
			g.Expect(declared).To(HaveKey(match[1]), page)
		}
	}
}

// headings are the anchors of a page, as GitHub makes them from its headings.
func headings(t *testing.T, page string) map[string]bool {
	t.Helper()
	text, err := os.ReadFile(page)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	dropped := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	anchors := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if title, is := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); is && strings.HasPrefix(line, "#") {
			anchors[strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(strings.TrimSpace(title)), ""), " ", "-")] = true
		}
	}
	return anchors
}

func TestTheReferenceIsAsTheCodeSays(t *testing.T) {
	g := NewWithT(t)
	t.Chdir("../..")
	want, err := reference()
	g.Expect(err).NotTo(HaveOccurred())
	written, err := os.ReadFile("docs/reference.md")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(written)).To(Equal(want), "make manifests writes it anew")
}

func TestTroubleshootingHasEveryReason(t *testing.T) {
	g := NewWithT(t)
	t.Chdir("../..")
	written, err := os.ReadFile("docs/troubleshooting.md")
	g.Expect(err).NotTo(HaveOccurred())
	want, err := withReasons(string(written))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(written)).To(Equal(want), "make manifests writes it anew")
	g.Expect(want).To(ContainSubstring("| `DRADriverActive` | "), "the table is there")
	_, err = withReasons("no marks")
	g.Expect(err).To(MatchError(ContainSubstring("no generated part")))
}
