// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	. "github.com/onsi/gomega"
)

func TestPrograms(t *testing.T) {
	bin := t.TempDir()
	const symbols = "github.com/gpusharing/gpu-sharing-operator/internal/kube/version"
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bin,
		"-ldflags", "-X "+symbols+".version=v9.8.7 -X "+symbols+".commit=abcdef", "./cmd/...")
	build.Dir = path(t)
	run(t, build)

	t.Run("have the flags that their pods give them", func(t *testing.T) { haveTheFlagsOfTheirPods(t, bin) })
	t.Run("print their version and commit", func(t *testing.T) {
		for program, name := range map[string]string{
			"controller": "gpu-sharing-controller", "agent": "gpu-sharing-agent", "kubectl-gpusharing": "kubectl-gpusharing",
		} {
			out, err := output(exec.CommandContext(t.Context(), filepath.Join(bin, program), "--version"))
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Expect(out).To(Equal(name + " v9.8.7 (commit abcdef)\n"))
		}
	})
}

// A flag that a program does not have would stop it at its first start.
func haveTheFlagsOfTheirPods(t *testing.T, bin string) {
	t.Helper()
	g := NewWithT(t)

	h := newHelm(t)
	pods := h.render(t, everything()...)
	pods = append(pods, h.render(t, "logLevel=2", "metrics.enabled=true", "metrics.sampling.interval=60s")...)
	pods = append(pods, read(t, "config/operands/deployment.yaml")...)
	programs := map[string]string{"controller": "controller", "check": "controller", "operands": "controller", "agent": "agent", "mps": "agent", "prepare": "agent"}
	started := map[string]bool{}
	for _, o := range pods {
		if !slices.Contains([]string{"Deployment", "DaemonSet", "Pod"}, o.GetKind()) {
			continue
		}
		pod := podOf(t, o).Spec
		for _, container := range append(pod.InitContainers, pod.Containers...) {
			// Flags are parsed in their order, so the help is printed only if all before are known.
			_, err := output(exec.CommandContext(t.Context(), filepath.Join(bin, programs[container.Name]), append(container.Args, "--help")...))
			g.Expect(err).NotTo(HaveOccurred(), name(o))
			started[container.Name] = true
		}
	}
	g.Expect(started).To(HaveLen(len(programs)))
}
