// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// TestTroubleshootingHasEveryReason compares the reasons of the API with the first column of docs/troubleshooting.md.
func TestTroubleshootingHasEveryReason(t *testing.T) {
	g := NewWithT(t)
	t.Chdir("../..")
	text, err := os.ReadFile("docs/troubleshooting.md")
	g.Expect(err).NotTo(HaveOccurred())
	answered := map[string]bool{}
	word := regexp.MustCompile("`([A-Za-z]+)`")
	for line := range strings.Lines(string(text)) {
		if cells := strings.Split(line, "|"); len(cells) == 4 {
			for _, match := range word.FindAllStringSubmatch(cells[1], -1) {
				answered[match[1]] = true
			}
		}
	}
	reasons := map[string]bool{}
	file, err := parser.ParseFile(token.NewFileSet(), constants, nil, 0)
	g.Expect(err).NotTo(HaveOccurred())
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, is := n.(*ast.ValueSpec); is && strings.HasPrefix(spec.Names[0].Name, "Reason") {
			reasons[literalOf(spec.Values[0])] = true
		}
		return true
	})
	g.Expect(reasons).NotTo(BeEmpty())
	g.Expect(answered).To(Equal(reasons), "docs/troubleshooting.md says what to do for each reason of %s, and for no other", constants)
}

// TestLinksOfDocsLeadSomewhere follows the links of all pages within the repository, down to their headings.
func TestLinksOfDocsLeadSomewhere(t *testing.T) {
	t.Chdir("../..")
	pages, err := filepath.Glob("docs/*.md")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	top, err := filepath.Glob("*.md")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	code, link := regexp.MustCompile("`[^`]*`"), regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for _, page := range append(pages, top...) {
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
