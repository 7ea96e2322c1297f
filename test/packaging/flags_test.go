// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	. "github.com/onsi/gomega"
)

// A flag that a program does not have would stop it at its first start.
func TestProgramsHaveTheFlagsThatTheirPodsGiveThem(t *testing.T) {
	g := NewWithT(t)
	bin := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "./cmd/controller", "./cmd/agent")
	build.Dir = path(t)
	run(t, build)

	h := newHelm(t)
	pods := h.render(t, everything()...)
	pods = append(pods, h.render(t, "logLevel=2", "metrics.enabled=true")...)
	pods = append(pods, read(t, "config/operands/deployment.yaml")...)
	programs := map[string]string{"controller": "controller", "operands": "controller", "agent": "agent", "mps": "agent", "prepare": "agent"}
	started := map[string]bool{}
	for _, o := range pods {
		if o.GetKind() != "Deployment" && o.GetKind() != "DaemonSet" {
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
