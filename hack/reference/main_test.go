// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	. "github.com/onsi/gomega"
)

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
