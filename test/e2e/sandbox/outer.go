// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"time"
)

// boxVariable tells init and sweep the machine's folder.
const boxVariable = "GPUSHARING_SANDBOX_DIR"

// parentPoll is how often the outer stage looks whether the process that started it is still there.
const parentPoll = time.Second

// outer starts the machine, waits for its end and leaves nothing behind.
func outer() (int, error) {
	if err := preflight(); err != nil {
		return 0, err
	}
	parent := os.Getppid()
	dir, err := os.MkdirTemp("", "gpusharing-e2e-")
	if err != nil {
		return 0, fmt.Errorf("making a folder for the machine: %w", err)
	}
	if err := os.Setenv(boxVariable, dir); err != nil {
		return 0, fmt.Errorf("naming the machine's folder: %w", err)
	}
	sweeper, lifeline, err := startSweeper()
	if err != nil {
		return 0, errors.Join(err, os.Remove(dir))
	}
	status, err := runMachine(dir, parent)
	// The sweeper waits for the end of this pipe; that outer is gone is the other way to end it.
	err = errors.Join(err, lifeline.Close())
	if swept := sweeper.Wait(); swept != nil {
		err = errors.Join(err, fmt.Errorf("clearing up after the machine: %w", swept))
	}
	return status, err
}

func startSweeper() (*exec.Cmd, io.Closer, error) {
	cmd := self(stageSweep)
	cmd.SysProcAttr.Setsid = true // no Ctrl-C reaches it
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, fmt.Errorf("starting what clears up: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("starting what clears up: %w", err)
	}
	return cmd, lifeline, nil
}

// runMachine runs the init stage in namespaces of its own, in the machine's control groups.
func runMachine(dir string, parent int) (int, error) {
	groups, err := enterGroups(dir)
	if err != nil {
		return 0, err
	}
	// The kernel kills init when the thread that started it ends, so this thread must stay until init has ended.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := self(stageInit)
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.SysProcAttr.Setpgid = true // Ctrl-C comes once, from us
	cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID |
		syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWCGROUP
	if err := cmd.Start(); err != nil {
		return 0, errors.Join(fmt.Errorf("starting the machine: %w", err), groups.leave())
	}
	done := make(chan struct{})
	go passSignals(cmd.Process, parent, done)
	err = cmd.Wait()
	close(done)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), groups.leave()
	}
	return 0, errors.Join(err, groups.leave())
}

// passSignals passes on what is asked of outer to the machine, and ends the machine when the process that started outer
// is gone: `go test` or make killed with SIGKILL.
func passSignals(machine *os.Process, parent int, done <-chan struct{}) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	tick := time.NewTicker(parentPoll)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case s := <-signals:
			_ = machine.Signal(s) // it may have ended by itself
		case <-tick.C:
			if os.Getppid() != parent {
				_ = machine.Kill()
			}
		}
	}
}
