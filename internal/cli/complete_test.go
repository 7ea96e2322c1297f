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

// TestKubectlAsksThePluginForCompletions: kubectl finds the script, or the program, in the PATH, which runs the plugin.
func TestKubectlAsksThePluginForCompletions(t *testing.T) {
	g := NewWithT(t)
	assets, err := env.Assets(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	var script strings.Builder
	g.Expect((&Program{Out: &script}).Run(t.Context(), []string{"completion"})).To(Succeed())
	program := filepath.Join(t.TempDir(), "program")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../../cmd/kubectl_complete-gpusharing")
	g.Expect(build.Run()).To(Succeed())
	built, err := os.ReadFile(program)
	g.Expect(err).NotTo(HaveOccurred())
	for name, completes := range map[string]string{"the script": script.String(), "the program, as on Windows": string(built)} {
		folder := t.TempDir()
		for name, content := range map[string]string{
			"kubectl_complete-gpusharing": completes,
			"kubectl-gpusharing":          "#!/bin/sh\nfor word; do printf '<%s>' \"$word\"; done; printf '\\n:4\\n'\n",
		} {
			g.Expect(os.WriteFile(filepath.Join(folder, name), []byte(content), 0o700)).To(Succeed())
		}
		kubectl := exec.CommandContext(t.Context(), filepath.Join(assets, "kubectl"), "__complete", "gpusharing", "status", "--policy", "a b", "")
		kubectl.Env = append(os.Environ(), "PATH="+strings.Join([]string{folder, assets, os.Getenv("PATH")}, string(filepath.ListSeparator)))
		out, err := kubectl.Output()
		g.Expect(err).NotTo(HaveOccurred(), name)
		g.Expect(string(out)).To(Equal("<__complete><status><--policy><a b><>\n:4\n"), name)
	}
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
		"advise node a ":             {},
		"advise --min-age ":          {},
		"top ":                       {words: []string{"node", "pod", "policy"}},
		"top policy a ":              {kind: "GPUSharingPolicyList"},
		"top node ":                  {kind: "GPUNodeList"},
		"top -o ":                    {words: []string{"json", "yaml"}},
		"dashboard --port ":          {},
		"status --context ":          {kind: contexts},
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
	NewWithT(t).Expect(flags.words).To(And(ContainElements("--not-ready", "--policy", "--context"), Not(ContainElement("--port"))), "those of the command")
	NewWithT(t).Expect(typed).To(Equal("--no"))
	config := filepath.Join(t.TempDir(), "config")
	NewWithT(t).Expect(os.WriteFile(config, []byte("contexts: [{name: west}, {name: east}, {name: eagle}]\n"), 0o600)).To(Succeed())
	t.Setenv("KUBECONFIG", config)
	for line, want := range map[string]string{
		"status --context ea": "eagle\neast\n:4\n",
		"status -o ya":        "yaml\n:4\n", "status --output=w": "wide\n:4\n", "pl": "plan\n:4\n", "status --not": "--not-ready\n:4\n", "plan -f x": ":0\n",
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
