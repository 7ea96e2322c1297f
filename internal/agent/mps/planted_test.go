// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps_test

import (
	"encoding/json"
	"os"
	"syscall"
	"testing"

	"github.com/onsi/gomega"
)

// The shared memory below the MPS root is the /dev/shm of every pod that uses MPS on the node, and any user writes
// there.
func TestWhatPodsPutIntoTheSharedMemoryIsNoDaemon(t *testing.T) {
	tests := map[string]func(g *gomega.WithT, n *node){
		"a record that names the daemon of others": func(g *gomega.WithT, n *node) {
			content, err := json.Marshal(map[string]any{"daemon": daemon(10, 1510)})
			g.Expect(err).NotTo(gomega.HaveOccurred())
			g.Expect(os.Mkdir(n.path("shm", "of-a-pod"), 0o755)).To(gomega.Succeed())
			g.Expect(os.WriteFile(n.path("shm", "of-a-pod", ".gpusharing.json"), content, 0o600)).To(gomega.Succeed())
		},
		"a link to the folder of another daemon": func(g *gomega.WithT, n *node) {
			g.Expect(os.Symlink("../nvidia.com/gpu", n.path("shm", "of-a-pod"))).To(gomega.Succeed())
		},
		"a named pipe, as programs use it to speak with each other": func(g *gomega.WithT, n *node) {
			g.Expect(syscall.Mkfifo(n.path("shm", "of-a-pod"), 0o666)).To(gomega.Succeed())
		},
	}
	for name, plant := range tests {
		t.Run(name, func(t *testing.T) {
			g, n := gomega.NewWithT(t), newNode(t)
			g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(gomega.Succeed())
			g.Expect(os.Mkdir(n.path("shm"), 0o755)).To(gomega.Succeed())
			plant(g, n)
			done := make(chan error, 1)
			go func() { done <- n.host.Converge(t.Context(), false) }()
			g.Eventually(done, "5s").Should(gomega.Receive(gomega.Succeed()), "it looks at the daemons")
			g.Expect(n.runner.Lines()).NotTo(gomega.ContainElement("nvidia-cuda-mps-control < quit"), "the daemon serves others too")
			g.Expect(n.daemons.Get(n.pipe())).NotTo(gomega.BeNil())
			g.Expect(n.view.Recorded()).To(gomega.HaveLen(1))
			g.Expect(n.view.Stop(t.Context(), resource)).To(gomega.Succeed())
			g.Expect(n.host.Unused()).To(gomega.BeTrue())
		})
	}
}

// A pod has the program of the driver, and can start a daemon of its own anywhere.
func TestADaemonOfAPodInTheSharedMemoryIsNotNVIDIAs(t *testing.T) {
	g, n := gomega.NewWithT(t), newNode(t)
	for _, folder := range []string{"pipe", "log"} {
		g.Expect(os.MkdirAll(n.path("shm", "of-a-pod", folder), 0o755)).To(gomega.Succeed())
	}
	g.Expect(os.WriteFile(n.path("shm", "of-a-pod", ".started"), nil, 0o600)).To(gomega.Succeed())
	g.Expect(n.daemons.Start(n.path("shm", "of-a-pod", "pipe"), n.path("shm", "of-a-pod", "log"))).To(gomega.Succeed())
	g.Expect(n.view.Observe(t.Context())).To(gomega.BeEmpty())
}
