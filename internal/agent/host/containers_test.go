// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

func TestContainersAreNamedByTheirLogs(t *testing.T) {
	g := NewWithT(t)
	folder := t.TempDir()
	root, err := os.OpenRoot(folder)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	logs := host.NewContainerLogs(root)
	g.Expect(logs.Names()).To(BeEmpty(), "no container has run yet")

	id, other := strings.Repeat("0a", 32), strings.Repeat("1b", 32)
	links := filepath.Join(folder, "var", "log", "containers")
	g.Expect(os.MkdirAll(links, 0o755)).To(Succeed())
	for _, name := range []string{
		"train-0_team-a_main-" + id + ".log", "web.v2-7d_default_cuda-sidecar-" + other + ".log", "lost+found", "a_b_c.log",
	} {
		g.Expect(os.Symlink("/var/log/pods/nowhere", filepath.Join(links, name))).To(Succeed())
	}
	g.Expect(os.Symlink("/var/log/pods/team-a_cut-off_uid-1/main/0.log", filepath.Join(links, "cut-off_team-a_main-"+id[:40]+".log"))).To(Succeed())
	g.Expect(logs.Names()).To(Equal(map[string]host.ContainerName{
		id:    {Namespace: "team-a", Pod: "train-0", Container: "main"},
		other: {Namespace: "default", Pod: "web.v2-7d", Container: "cuda-sidecar"},
		// The kubelet cuts the names of such links, not where they lead.
		"uid-1": {Namespace: "team-a", Pod: "cut-off"},
	}))
}
