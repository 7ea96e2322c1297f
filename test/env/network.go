// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// inside is set in the process that has a network of its own.
const inside = "GPUSHARING_NETWORK"

// InNetworkOfItsOwn runs this program again in a network namespace that has nothing but a loopback interface, for
// programs of others that listen on all addresses and have no flag for that. In that process done is false, and the
// tests run. In the first one done is true, with the exit status of the other. An API server there needs the flag
// advertise-address: there is no route by which it could find one. Hosts are names that mean the loopback interface
// there, such as those of Services.
func InNetworkOfItsOwn(hosts ...string) (code int, done bool, err error) {
	if os.Getenv(inside) != "" {
		return 0, false, errors.Join(bringUp(), nameHosts(hosts))
	}
	again := exec.Command("/proc/self/exe", os.Args[1:]...)
	again.Env = append(os.Environ(), inside+"=1")
	again.Stdin, again.Stdout, again.Stderr = os.Stdin, os.Stdout, os.Stderr
	again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if len(hosts) > 0 {
		again.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	}
	if os.Getuid() != 0 {
		again.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		again.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		again.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	runtime.LockOSThread() // the signal comes with the end of the thread
	if err := again.Start(); err != nil {
		return 0, false, err
	}
	go func() {
		for s := range signals {
			_ = again.Process.Signal(s)
		}
	}()
	err = again.Wait()
	if exit, is := errors.AsType[*exec.ExitError](err); is {
		return max(exit.ExitCode(), 1), true, nil
	}
	return 0, true, err
}

// bringUp brings the loopback interface up.
func bringUp() error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening a socket: %w", err)
	}
	defer func() { _ = unix.Close(socket) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("naming the loopback interface: %w", err)
	}
	request.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request)
}

// nameHosts lets names mean the loopback interface: by a file that nobody outside sees as /etc/hosts.
func nameHosts(hosts []string) error {
	if len(hosts) == 0 {
		return nil
	}
	file, err := os.CreateTemp("", "hosts-")
	if err != nil {
		return fmt.Errorf("naming hosts: %w", err)
	}
	defer func() { _ = errors.Join(file.Close(), os.Remove(file.Name())) }()
	if _, err := fmt.Fprintln(file, "127.0.0.1 localhost", strings.Join(hosts, " ")); err != nil {
		return fmt.Errorf("naming hosts: %w", err)
	}
	if err := unix.Mount(file.Name(), "/etc/hosts", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting a file at /etc/hosts: %w", err)
	}
	return nil
}
