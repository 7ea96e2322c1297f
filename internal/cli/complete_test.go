// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// TestCompletions are the answers to kubectl, which ends the command line with the word that is being typed.
func TestCompletions(t *testing.T) {
	for line, want := range map[string]completion{
		"":                           {words: commands},
		"st":                         {words: commands},
		"--context c st":             {words: commands},
		"status ":                    {kind: "GPUNodeList"},
		"status a":                   {kind: "GPUNodeList"},
		"status --policy ":           {kind: "GPUSharingPolicyList"},
		"status --policy=re":         {kind: "GPUSharingPolicyList"},
		"status --not-ready ":        {kind: "GPUNodeList"},
		"status --policy research a": {kind: "GPUNodeList"},
		"plan --delete re":           {kind: "GPUSharingPolicyList"},
		"status -o ":                 {words: []string{"json", "wide", "yaml"}},
		"plan -f ":                   {files: true},
		"plan --kubeconfig=":         {files: true},
		"restore ":                   {},
		"plan --nonsense ":           {words: nil},
	} {
		t.Run(line, func(t *testing.T) {
			got, _, _ := complete(strings.Split(line, " "))
			if line == "plan --nonsense " {
				NewWithT(t).Expect(got.files).To(BeFalse(), "no error, and no guess")
				return
			}
			NewWithT(t).Expect(got).To(Equal(want))
		})
	}
	flags, typed, _ := complete([]string{"status", "--no"})
	NewWithT(t).Expect(flags.words).To(ContainElements("--not-ready", "--policy"))
	NewWithT(t).Expect(typed).To(Equal("--no"))
	for line, want := range map[string]string{
		"status -o ya": "yaml\n:4\n", "status --output=w": "wide\n:4\n", "pl": "plan\n:4\n", "status --not": "--not-ready\n:4\n", "plan -f x": ":0\n",
		"status --kubeconfig /no/such/file ": ":4\n",
	} {
		var out strings.Builder
		err := (&Program{Out: &out}).Run(t.Context(), append([]string{"__complete"}, strings.Split(line, " ")...))
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		NewWithT(t).Expect(out.String()).To(Equal(want), line)
	}
	for _, command := range commands {
		NewWithT(t).Expect(help).To(ContainSubstring("kubectl gpusharing " + command))
	}
}
