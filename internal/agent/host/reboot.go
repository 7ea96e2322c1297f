// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// rebootSignal is SIGRTMIN+5, as glibc counts: systemd then starts reboot.target, as `systemctl reboot` does
// (systemd(1), "Signals"). An init that does not know it takes no notice.
const rebootSignal = syscall.Signal(34 + 5)

// initPID is the process that runs the node.
const initPID = 1

// Systemd is the Rebooter of a node that systemd runs. It needs the host's PID namespace and the right to signal root's
// processes, and runs no program of the host.
type Systemd struct {
	root *os.Root
	kill func(pid int, signal syscall.Signal) error
}

// NewSystemd reads the proc file system under root, such as /proc, which must be that of the host's PID namespace.
func NewSystemd(root *os.Root) *Systemd { return &Systemd{root: root, kill: syscall.Kill} }

// Able implements Rebooter.
func (s *Systemd) Able() error {
	comm, err := s.root.ReadFile(fmt.Sprintf("%d/comm", initPID))
	if err != nil {
		return fmt.Errorf("finding out what runs the node: %w", err)
	}
	if name := strings.TrimSpace(string(comm)); name != "systemd" {
		return fmt.Errorf("process 1 is %s, and only systemd is known to reboot a node in order when it is asked to by a signal; "+
			"reboot the node by hand", name)
	}
	return nil
}

// Reboot implements Rebooter.
func (s *Systemd) Reboot() error {
	if err := s.Able(); err != nil {
		return err
	}
	if err := s.kill(initPID, rebootSignal); err != nil {
		return fmt.Errorf("asking systemd to reboot the node: %w", err)
	}
	return nil
}

// NoReboot is the Rebooter of an agent that must not reboot its node. It is the reason, and what to do about it.
type NoReboot string

// Able implements Rebooter.
func (n NoReboot) Able() error { return errors.New(string(n)) }

// Reboot implements Rebooter.
func (n NoReboot) Reboot() error { return n.Able() }
