// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
)

const document = "docs/dev/guides.md"

// TestTheDocumentIsAsTheCaseFilesSay.
func TestTheDocumentIsAsTheCaseFilesSay(t *testing.T) {
	g := NewWithT(t)
	t.Chdir("../..")
	written, err := os.ReadFile(document)
	g.Expect(err).NotTo(HaveOccurred())
	all, err := guides.All()
	g.Expect(err).NotTo(HaveOccurred())
	want, err := withTables(string(written), all)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(written)).To(Equal(want), "make manifests writes it anew")
}

func TestWhatAnEntryShows(t *testing.T) {
	g := NewWithT(t)
	one := guides.Guide{Title: "A guide", By: "NVIDIA", URL: "https://example.com", Entries: []guides.Entry{
		{Lines: "1-2", Is: guides.Step, Guide: "runs a | b for <node>", Here: "`kubectl x`"},
		{Lines: "3", Is: guides.Caveat, Guide: "warns", NotOurs: "NVIDIA's", See: "docs/x.md#y"},
	}}
	written, err := withTables("before\n"+begin+"old\n"+end+"after\n", []guides.Guide{one})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(written).To(And(HavePrefix("before\n"+begin), HaveSuffix(end+"after\n"), Not(ContainSubstring("old")),
		ContainSubstring("### A guide\n\nBy [NVIDIA](https://example.com).\n"),
		ContainSubstring("| 1-2 | step | runs a \\| b for &lt;node> | `kubectl x` |\n"),
		ContainSubstring("| 3 | caveat | warns | *Not ours:* NVIDIA's ([docs/x.md](../x.md#y)) |\n")))
	_, err = withTables("no marks", nil)
	g.Expect(err).To(MatchError(ContainSubstring("no generated part")))
}
