// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// shipped is the path of a program that ships. make test has built them all.
func shipped(tb testing.TB, program string) string {
	tb.Helper()
	folder := os.Getenv("GPUSHARING_PROGRAMS")
	if folder == "" {
		folder = strings.TrimSpace(run(tb, exec.CommandContext(tb.Context(), path(tb, "hack/shipped.sh"))))
	}
	file := filepath.Join(folder, program)
	if _, err := os.Stat(file); err != nil { // go test keeps no result of another program
		tb.Fatal(err)
	}
	return file
}

func TestPrograms(t *testing.T) {
	t.Run("have the flags that their pods give them", haveTheFlagsOfTheirPods)
	t.Run("print their version and commit", func(t *testing.T) {
		version := read(t, "config/helm/Chart.yaml")[0].Object["appVersion"]
		for program, name := range map[string]string{
			"controller": "gpu-sharing-controller", "agent": "gpu-sharing-agent", "kubectl-gpusharing": "kubectl-gpusharing",
		} {
			out, err := output(exec.CommandContext(t.Context(), shipped(t, program), "--version"))
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Expect(out).To(Equal(fmt.Sprintf("%s v%s (commit abcdef)\n", name, version)))
		}
	})
}

// A flag that a program does not have would stop it at its first start.
func haveTheFlagsOfTheirPods(t *testing.T) {
	t.Helper()
	g := NewWithT(t)

	h := newHelm(t)
	pods := h.render(t, everything()...)
	pods = append(pods, h.render(t, "logLevel=2", "metrics.enabled=true", "metrics.sampling.interval=60s")...)
	pods = append(pods, read(t, "config/operands/deployment.yaml")...)
	programs := map[string]string{"controller": "controller", "check": "controller", "operands": "controller", "agent": "agent", "mps": "agent", "prepare": "agent"}
	files := map[string]string{"controller": shipped(t, "controller"), "agent": shipped(t, "agent")}
	started := map[string]bool{}
	for _, o := range pods {
		if !slices.Contains([]string{"Deployment", "DaemonSet", "Pod"}, o.GetKind()) {
			continue
		}
		pod := podOf(t, o).Spec
		for _, container := range append(pod.InitContainers, pod.Containers...) {
			// Flags are parsed in their order, so the help is printed only if all before are known.
			_, err := output(exec.CommandContext(t.Context(), files[programs[container.Name]], append(container.Args, "--help")...))
			g.Expect(err).NotTo(HaveOccurred(), name(o))
			started[container.Name] = true
		}
	}
	g.Expect(started).To(HaveLen(len(programs)))
}
