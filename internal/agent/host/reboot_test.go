// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	. "github.com/onsi/gomega"
)

// asked records signals in place of sending them.
type asked struct {
	pids    []int
	signals []syscall.Signal
	err     error
}

func (a *asked) kill(pid int, signal syscall.Signal) error {
	a.pids, a.signals = append(a.pids, pid), append(a.signals, signal)
	return a.err
}

func systemd(t *testing.T, comm string, a *asked) *Systemd {
	t.Helper()
	g := NewWithT(t)
	dir := t.TempDir()
	g.Expect(os.Mkdir(filepath.Join(dir, "1"), 0o755)).To(Succeed())
	g.Expect(os.WriteFile(filepath.Join(dir, "1", "comm"), []byte(comm+"\n"), 0o600)).To(Succeed())
	root, err := os.OpenRoot(dir)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	s := NewSystemd(root)
	s.kill = a.kill
	return s
}

func TestSystemdIsAskedToRebootByItsSignal(t *testing.T) {
	g := NewWithT(t)
	a := &asked{}
	s := systemd(t, "systemd", a)
	g.Expect(s.Able()).To(Succeed())
	g.Expect(s.Reboot()).To(Succeed())
	g.Expect(a.pids).To(Equal([]int{1}))
	g.Expect(a.signals).To(Equal([]syscall.Signal{39}), "SIGRTMIN+5 of glibc")
}

func TestAnotherInitIsNotSignalled(t *testing.T) {
	for _, comm := range []string{"init", "machined", "agent"} {
		g := NewWithT(t)
		a := &asked{}
		s := systemd(t, comm, a)
		g.Expect(s.Able()).To(MatchError(ContainSubstring("process 1 is " + comm + ", and only systemd")))
		g.Expect(s.Reboot()).To(MatchError(ContainSubstring("reboot the node by hand")))
		g.Expect(a.pids).To(BeEmpty())
	}
}

func TestARefusedSignalIsAnError(t *testing.T) {
	g := NewWithT(t)
	a := &asked{err: syscall.EPERM}
	g.Expect(systemd(t, "systemd", a).Reboot()).To(MatchError(ContainSubstring("asking systemd to reboot the node: operation not permitted")))
}

func TestWhoMustNotRebootSaysWhy(t *testing.T) {
	g := NewWithT(t)
	n := NoReboot("not allowed; allow it")
	g.Expect(n.Able()).To(MatchError("not allowed; allow it"))
	g.Expect(n.Reboot()).To(MatchError("not allowed; allow it"))
}
