// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// sharesTmpfs mounts shared memory of a mebibyte below the MPS root.
func (n *node) sharesTmpfs(t *testing.T, g *WithT) {
	t.Helper()
	g.Expect(os.Mkdir(n.path("shm"), 0o755)).To(Succeed())
	if err := unix.Mount("shm", n.path("shm"), "tmpfs", 0, "size=1m"); errors.Is(err, unix.EPERM) {
		t.Skip("mounting needs root")
	} else {
		g.Expect(err).NotTo(HaveOccurred())
	}
	t.Cleanup(func() { _ = unix.Unmount(n.path("shm"), unix.MNT_DETACH) })
}

// starts is how often a daemon was started.
func (n *node) starts() (count int) {
	for _, line := range n.runner.Lines() {
		if strings.HasSuffix(line, "nvidia-cuda-mps-control -d") {
			count++
		}
	}
	return count
}

// Files that a pod has left in the shared memory count in no container's memory limit, and would stay until the machine
// boots.
func TestWhatEndedPodsLeaveInTheSharedMemoryGoes(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	n.sharesTmpfs(t, g)
	g.Expect(n.view.Start(t.Context(), daemon(25, 1510))).To(Succeed())
	pid, _ := n.client(t, "pod-a", 1000)
	converges := func() {
		t.Helper()
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	}
	left := n.path("shm", "left")
	g.Expect(os.WriteFile(left, make([]byte, 100<<10), 0o600)).To(Succeed())
	n.daemons.End(pid)
	converges()
	g.Expect(left).To(BeAnExistingFile(), "a tenth of it is no reason to start a daemon anew")
	g.Expect(n.starts()).To(Equal(1))

	may := n.daemons.Run(n.pipe(), "pod-b", 1000)
	g.Expect(os.WriteFile(left, make([]byte, 300<<10), 0o600)).To(Succeed())
	converges()
	g.Expect(left).To(BeAnExistingFile(), "a pod has the pipe directory, and may use any file")
	g.Expect(n.starts()).To(Equal(1))

	n.daemons.End(may)
	converges()
	g.Expect(left).NotTo(BeAnExistingFile())
	g.Expect(n.starts()).To(Equal(2), "a daemon has files of its own there")
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Percentage).To(Equal(25.0))
	converges()
	g.Expect(n.starts()).To(Equal(2))
}

// Who is no client can have removed files of the shared memory open: it was handed them by a pod that was one.
func TestIdleDaemonsAreNotStartedAnewAgainAndAgain(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	n.sharesTmpfs(t, g)
	g.Expect(n.view.Start(t.Context(), daemon(25, 1510))).To(Succeed())
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.starts()).To(Equal(1))
	held, err := os.Create(n.path("shm", "held"))
	g.Expect(err).NotTo(HaveOccurred())
	defer held.Close() //nolint:errcheck // removed
	_, err = held.Write(make([]byte, 300<<10))
	g.Expect(errors.Join(err, os.Remove(held.Name()))).NotTo(HaveOccurred())
	g.Expect(n.host.Converge(t.Context(), true)).To(MatchError(ContainSubstring("lsof +L1")))
	for range 60 {
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		n.clock.Step(5 * time.Second)
	}
	g.Expect(n.starts()).To(Equal(2))

	g.Expect(held.Truncate(0)).To(Succeed())
	n.clock.Step(time.Hour)
	for range 60 { // it fills it again as soon as it was emptied
		g.Expect(os.WriteFile(n.path("shm", "again"), make([]byte, 300<<10), 0o600)).To(Succeed())
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		n.clock.Step(5 * time.Second)
	}
	g.Expect(n.starts()).To(Equal(3))
}

// A program on the node itself, or a pod with a folder above the pipe directory, is connected though nobody gave it the pipe
// directory.
func TestTheSharedMemoryOfAConnectedClientIsLeft(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	n.sharesTmpfs(t, g)
	g.Expect(n.view.Start(t.Context(), daemon(25, 1510))).To(Succeed())
	client := n.daemons.Name(n.pipe(), "", 1000)
	_, served, err := n.daemons.Connect(client)
	g.Expect(served, err).To(BeTrue())
	its := n.path("shm", "cuda.shm.client")
	g.Expect(os.WriteFile(its, make([]byte, 300<<10), 0o600)).To(Succeed())
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(its).To(BeAnExistingFile())
	g.Expect(n.starts()).To(Equal(1))

	n.daemons.End(client)
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(its).NotTo(BeAnExistingFile())
}

func TestTheSharedMemoryOfNVIDIAsDaemonIsLeft(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	n.sharesTmpfs(t, g)
	g.Expect(os.MkdirAll(n.pipe(), 0o755)).To(Succeed())
	g.Expect(os.WriteFile(n.path(resource, ".started"), nil, 0o600)).To(Succeed())
	g.Expect(os.WriteFile(n.path("shm", "theirs"), make([]byte, 900<<10), 0o600)).To(Succeed())
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.path("shm", "theirs")).To(BeAnExistingFile())
}
