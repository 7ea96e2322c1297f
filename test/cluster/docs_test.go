// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// elsewhere are the blocks of commands in README and the pages for users that TestCommandsOfDocs does not run, by their
// page and their first command, each with what runs it or why nothing does.
var elsewhere = map[string]string{
	"README.md: make demo":                "CI",
	"README.md: make publish":             "hack/release, and make e2e the installation",
	"docs/dra.md: kubectl patch":          "needs NVIDIA's DRA driver",
	"docs/install.md: helm install":       "make e2e",
	"docs/install.md: helm uninstall":     "make olm-test",
	"docs/install.md: kubectl gpusharing": "tests of internal/cli: import; make e2e and make olm-test: restore and what follows",
	"docs/install.md: kubectl apply":      "make olm-test",
	"docs/install.md: kubectl -n":         "make olm-test",
	"docs/monitoring.md: helm upgrade":    "has values of an installation; make e2e turns metrics on",
	"docs/monitoring.md: kubectl -n":      "the settings of OLM: TestASubscriptionTurnsMetricsOn of cmd/controller",
	"docs/mps.md: kubectl -n":             "logs need a kubelet",
}

// TestCommandsOfDocs runs the commands of README and of the pages for users, in the order of a reader who shares the
// GPUs of a node by the quickstart, looks at everything, and undoes it.
func TestCommandsOfDocs(t *testing.T) {
	if os.Getenv("GPUSHARING_PROGRAMS") == "" {
		t.Skip("set GPUSHARING_PROGRAMS to the folder that hack/shipped.sh prints, as make test does")
	}
	root, err := env.Root()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	blocks := map[string][]string{} // of each page
	found := map[string]bool{}
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	for _, page := range append(pages, filepath.Join(root, "README.md")) {
		text, err := os.ReadFile(page)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		name := strings.TrimPrefix(page, root+"/")
		for _, block := range regexp.MustCompile("(?s)\n```sh\n(.*?\n)```").FindAllStringSubmatch(string(text), -1) {
			first := name + ": " + strings.Join(strings.Fields(block[1])[:2], " ")
			if found[first] = true; elsewhere[first] == "" {
				blocks[name] = append(blocks[name], block[1])
			}
		}
	}
	for first := range elsewhere {
		NewWithT(t).Expect(found).To(HaveKey(first), "is not there any more: remove it from elsewhere")
	}

	f := newFleet(t, 2)
	sh := f.shell(root)
	quickstart := blocks["docs/quickstart.md"]
	undo := len(quickstart) - 1
	for _, block := range quickstart[:undo] {
		sh(block)
	}
	delete(blocks, "docs/quickstart.md")
	readme := blocks["README.md"]
	delete(blocks, "README.md")
	for _, page := range slices.Sorted(maps.Keys(blocks)) {
		for _, block := range blocks[page] {
			sh(block)
		}
	}
	sh(quickstart[undo])
	for _, block := range readme {
		sh(block)
	}
}

// foretold lets plan exit with what it finds.
const foretold = `kubectl() { command kubectl "$@" || { rc=$?; [[ "$*" == "gpusharing plan "* ]] && [ $rc -ge 2 ] || return $rc; }; }
`

// shell runs commands as an administrator of the fleet does, in a folder with the policies of README and quickstart.
func (f *fleet) shell(root string) func(commands string) {
	f.t.Helper()
	dir := f.t.TempDir()
	for file, page := range map[string]string{"policy.yaml": "README.md", "notebooks.yaml": "docs/quickstart.md"} {
		text, err := os.ReadFile(filepath.Join(root, page))
		f.Expect(err).NotTo(HaveOccurred())
		policy := regexp.MustCompile("(?s)\n```yaml\n(apiVersion: gpusharing.*?\n)```").FindSubmatch(text)
		f.Expect(policy).NotTo(BeNil(), page)
		f.Expect(os.WriteFile(filepath.Join(dir, file), policy[1], 0o600)).To(Succeed())
	}
	f.Expect(env.WriteKubeconfig(f.cluster.Config, filepath.Join(dir, "kubeconfig"))).To(Succeed())
	assets, err := env.Assets(f.t.Context())
	f.Expect(err).NotTo(HaveOccurred())
	of := strings.NewReplacer("gpunode NODE", "gpunode n01", "gpunode/NODE", "gpunode/n01", "node NODE", "node n01", "status NODE", "status n01",
		"policy NAME", "policy notebooks", "policy/NAME", "policy/notebooks",
		"gpusharing doctor", "gpusharing doctor || [ $? = 3 ]") // the controllers of a fleet are no installation
	return func(commands string) {
		f.t.Helper()
		ctx, cancel := context.WithTimeout(f.t.Context(), patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", foretold+of.Replace(commands))
		cmd.Dir = dir
		cmd.Env = []string{
			"PATH=" + strings.Join([]string{os.Getenv("GPUSHARING_PROGRAMS"), assets, os.Getenv("PATH")}, ":"), "HOME=" + dir,
			"KUBECONFIG=" + filepath.Join(dir, "kubeconfig"),
		}
		out, err := cmd.CombinedOutput()
		f.Expect(err).NotTo(HaveOccurred(), "%s\n%s", commands, out)
	}
}
