// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestKubectlAsksThePluginByTheScript: kubectl finds the script in the PATH, which runs the plugin.
func TestKubectlAsksThePluginByTheScript(t *testing.T) {
	g := NewWithT(t)
	assets, err := env.Assets(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	var script strings.Builder
	g.Expect((&Program{Out: &script}).Run(t.Context(), []string{"completion"})).To(Succeed())
	folder := t.TempDir()
	for name, content := range map[string]string{
		"kubectl_complete-gpusharing": script.String(),
		"kubectl-gpusharing":          "#!/bin/sh\nprintf '%s\\n' \"asked: $*\" :4\n",
	} {
		g.Expect(os.WriteFile(filepath.Join(folder, name), []byte(content), 0o700)).To(Succeed())
	}
	kubectl := exec.CommandContext(t.Context(), filepath.Join(assets, "kubectl"), "__complete", "gpusharing", "status", "--policy", "re")
	kubectl.Env = append(os.Environ(), "PATH="+strings.Join([]string{folder, assets, os.Getenv("PATH")}, string(filepath.ListSeparator)))
	out, err := kubectl.Output()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(out)).To(Equal("asked: __complete status --policy re\n:4\n"))
}

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
		"must-gather --nodes a":      {kind: "GPUNodeList"},
		"must-gather --output ":      {files: true},
		"plan -f ":                   {files: true},
		"plan --kubeconfig=":         {files: true},
		"restore ":                   {},
		"advise ":                    {words: []string{"namespace", "node", "policy"}},
		"advise policy ":             {kind: "GPUSharingPolicyList"},
		"advise node a":              {kind: "GPUNodeList"},
		"advise namespace ":          {},
		"advise --min-age ":          {},
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
