// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"os"
	"os/exec"
	"testing"

	"github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

func TestAProcessIsKilledByItsPID(t *testing.T) {
	g := gomega.NewWithT(t)
	root, err := os.OpenRoot("/proc")
	g.Expect(err).NotTo(gomega.HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	proc := host.NewProc(root)
	sleep := exec.CommandContext(t.Context(), "sleep", "1h")
	g.Expect(sleep.Start()).To(gomega.Succeed())
	pid := sleep.Process.Pid
	g.Eventually(func() []string { return proc.Arguments(pid) }).Should(gomega.Equal([]string{"sleep", "1h"}))

	g.Expect(proc.Kill(pid)).To(gomega.Succeed())
	g.Expect(sleep.Wait()).To(gomega.MatchError("signal: killed"))
	g.Expect(proc.Arguments(pid)).To(gomega.BeEmpty())
	g.Expect(proc.Kill(pid)).To(gomega.Succeed(), "one that is gone is no error")
}
