// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// RebootSignal is what asks systemd, as process 1, to reboot the machine: SIGRTMIN+5 (systemd(1), "Signals"). Process 1
// of this machine passes it on to the inside stage, which can boot the machine anew as it sees fit.
const RebootSignal = syscall.Signal(34 + 5)

// initName is what process 1 is called: on a real node it is systemd.
const initName = "systemd"

// boot is process 1 of the machine: it mounts the machine's root, brings its network up, starts the inside stage and
// returns that one's exit status.
func boot(o Options) (int, error) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, RebootSignal)
	where, err := os.Getwd()
	if err != nil {
		return 0, fmt.Errorf("finding the working directory: %w", err)
	}
	if err := unix.Sethostname([]byte(o.Hostname)); err != nil {
		return 0, fmt.Errorf("naming the machine: %w", err)
	}
	if hidden(where) {
		o.Visible = append(o.Visible, where)
	}
	if err := mountRoot(os.Getenv(boxVariable), o); err != nil {
		return 0, err
	}
	if err := startNetwork(o.Addresses); err != nil {
		return 0, err
	}
	if err := os.WriteFile("/proc/self/comm", []byte(initName), 0); err != nil {
		return 0, fmt.Errorf("naming process 1: %w", err)
	}
	if err := os.Chdir(where); err != nil {
		return 0, fmt.Errorf("going to the working directory inside the machine: %w", err)
	}
	if err := os.Unsetenv("TMPDIR"); err != nil { // the machine has a /tmp of its own
		return 0, fmt.Errorf("forgetting where temporary files go outside: %w", err)
	}
	cmd := self(stageInside)
	cmd.Stdin = nil
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("starting the inside of the machine: %w", err)
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s) // it may have ended by itself
		}
	}()
	return reap(cmd)
}

// reap waits for every process whose parent is gone, as process 1 must, until the one that was started has ended.
func reap(cmd *exec.Cmd) (int, error) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return 0, fmt.Errorf("waiting for the inside of the machine: %w", err)
		case pid == cmd.Process.Pid && status.Signaled():
			return 0, fmt.Errorf("the inside of the machine was ended by signal %v", status.Signal())
		case pid == cmd.Process.Pid:
			return status.ExitStatus(), nil
		}
	}
}

// startNetwork brings the loopback interface up and gives it the machine's addresses: the kernel has no dummy interface
// everywhere, and a kubelet asks only that its address is on some interface and not 127.0.0.1.
func startNetwork(addresses []string) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening a socket: %w", err)
	}
	defer unix.Close(socket) //nolint:errcheck // nothing was written to it
	if err := bringUp(socket); err != nil {
		return err
	}
	for i, address := range addresses {
		if err := addAddress(socket, fmt.Sprintf("lo:%d", i+1), address); err != nil {
			return err
		}
	}
	return nil
}
