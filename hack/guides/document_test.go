// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
)

const document = "docs/dev/guides.md"

// section is the part of the document under a headline.
func section(t *testing.T, headline string) string {
	t.Helper()
	g := NewWithT(t)
	t.Chdir("../..")
	text, err := os.ReadFile(document)
	g.Expect(err).NotTo(HaveOccurred())
	_, after, found := strings.Cut(string(text), "\n## "+headline+"\n")
	g.Expect(found).To(BeTrue(), "%s has the headline %q", document, headline)
	body, _, _ := strings.Cut(after, "\n## ")
	return body
}

// TestMistakesOfTheGuidesAreNamed where they stand, with what the status reports of each.
func TestMistakesOfTheGuidesAreNamed(t *testing.T) {
	g := NewWithT(t)
	numbers := map[string]string{"Blog": "000", "CERN": "001", "NVIDIA": "002", "Red Hat": "003"}
	all, err := guides.All()
	g.Expect(err).NotTo(HaveOccurred())
	table := section(t, "Mistakes in the guides")
	reasons := texts(t, "api/v1alpha1/conditions.go")
	var named []string
	for _, m := range regexp.MustCompile(`(?m)^\| (Blog|CERN|NVIDIA|Red Hat), line (\d+): .* \| .+ \| (.+) \|$`).FindAllStringSubmatch(table, -1) {
		line, err := strconv.Atoi(m[2])
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(slices.ContainsFunc(all, func(o guides.Guide) bool {
			return strings.HasPrefix(o.Name, numbers[m[1]]) && slices.ContainsFunc(o.Entries, func(e guides.Entry) bool {
				first, last, err := e.Range()
				return err == nil && first <= line && line <= last
			})
		})).To(BeTrue(), "%s, line %d: the case file has no entry for it", m[1], line)
		for _, reason := range regexp.MustCompile("`([A-Z][A-Za-z]+)`").FindAllStringSubmatch(m[3], -1) {
			g.Expect(reasons[reason[1]]).To(BeTrue(), "%s, line %d: no status has %s", m[1], line, reason[1])
		}
		named = append(named, m[1]+" "+m[2])
	}
	g.Expect(named).To(ConsistOf("Blog 169", "Blog 728", "Blog 418", "Blog 460", "Blog 910", "Blog 301", "Red Hat 283", "Red Hat 305", "CERN 450",
		"NVIDIA 370"))
}

// texts are the strings in a Go file.
func texts(t *testing.T, file string) map[string]bool {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	found := map[string]bool{"Verifying": true, "Ready": true} // a state, and a condition of Kubernetes
	ast.Inspect(parsed, func(n ast.Node) bool {
		if literal, is := n.(*ast.BasicLit); is && literal.Kind == token.STRING {
			if text, err := strconv.Unquote(literal.Value); err == nil {
				found[text] = true
			}
		}
		return true
	})
	return found
}
