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
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
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
	config := filepath.Join(t.TempDir(), "config")
	NewWithT(t).Expect(os.WriteFile(config, []byte("contexts: [{name: west}, {name: east}, {name: eagle}]\n"), 0o600)).To(Succeed())
	t.Setenv("KUBECONFIG", config)
	for line, want := range map[string]string{
		"status --context ea": "eagle\neast\n:4\n", "--context ea": "eagle\neast\n:4\n",
		"status -o ya": "yaml\n:4\n", "status --output=w": "wide\n:4\n", "status --output ": "json\nwide\nyaml\n:4\n", "top -o ": "json\nyaml\n:4\n",
		"plan -f ": ":0\n", "plan -f x": ":0\n", "must-gather --output ": ":0\n", "plan --kubeconfig=": ":0\n", "restore ": ":4\n", "dashboard --port ": ":4\n",
		"advise --min-age ": ":4\n", "status --kubeconfig /no/such/file ": ":4\n",
		"advise ": "namespace\nnode\npolicy\n:4\n", "advise n": "namespace\nnode\n:4\n", "advise node a ": ":4\n", "advise namespace ": ":4\n",
		"top ": "node\npod\npolicy\n:4\n",
	} {
		NewWithT(t).Expect(completed(t, line)).To(Equal(want), line)
	}
	NewWithT(t).Expect(completed(t, "pl")).To(HavePrefix("plan\tPrints what policies would do"), "a command, with what it does")
	NewWithT(t).Expect(completed(t, "status --no")).To(HavePrefix("--not-ready\tonly nodes that are not ready\n"), "a flag of the command")
	NewWithT(t).Expect(completed(t, "status --")).To(And(ContainSubstring("--context"), Not(ContainSubstring("--port"))), "and those of all, but not of others")
}

func completed(t *testing.T, line string) string {
	t.Helper()
	var out strings.Builder
	err := (&Program{Out: &out}).Run(t.Context(), append([]string{"__complete"}, strings.Split(line, " ")...))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return out.String()
}

// TestNamesOfTheClusterAreCompleted: of nodes and policies.
func TestNamesOfTheClusterAreCompleted(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	populate(t, cluster.Client, newNode(t, "gpu-a", sim.T4))
	research := policy(t, "research", slicing)
	g.Expect(cluster.Client.Create(t.Context(), &research)).To(Succeed())
	t.Setenv("KUBECONFIG", kubeconfigOf(t, cluster.Config, ""))
	for line, want := range map[string]string{
		"status ": "gpu-a\nresearch\n:4\n", "status gpu": "gpu-a\n:4\n", "status --policy re": "research\n:4\n", "status --policy=": "research\n:4\n",
		"status --not-ready g": "gpu-a\n:4\n", "plan --delete re": "research\n:4\n", "must-gather --nodes g": "gpu-a\n:4\n", "advise policy ": "research\n:4\n",
		"advise node g": "gpu-a\n:4\n", "top node ": "gpu-a\n:4\n", "top policy a ": "research\n:4\n",
	} {
		g.Expect(completed(t, line)).To(Equal(want), line)
	}
}
