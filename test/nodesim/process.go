// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Process is a program of a node that runs for real, in a process group of its own. It implements Program.
type Process struct {
	Health string // URL of its readiness probe; empty: it is ready when it runs

	cmd      *exec.Cmd
	patience time.Duration
	done     chan struct{}
	failed   error
}

// StartProcess starts a command, whose output goes to the end of a file. Told to end, it has so long until it is killed.
func StartProcess(cmd *exec.Cmd, logFile string, patience time.Duration) (*Process, error) {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	defer log.Close() //nolint:errcheck // the child writes it
	cmd.Stdout, cmd.Stderr = log, log
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	p := &Process{cmd: cmd, patience: patience, done: make(chan struct{})}
	go func() {
		p.failed = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Done is closed once the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Failed is how the process has failed, once it has ended.
func (p *Process) Failed() error { return p.failed }

// Alive implements Program.
func (p *Process) Alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Ready implements Program.
func (p *Process) Ready(ctx context.Context) bool {
	if p.Health == "" {
		return p.Alive()
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.Health, http.NoBody)
	if err != nil {
		return false
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// Stop implements Program: it asks, and insists after a while.
func (p *Process) Stop() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(p.patience):
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.done
	}
}

// FreeAddress is an address of loopback that nobody listens on.
func FreeAddress(ctx context.Context) (string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("finding a free port: %w", err)
	}
	defer listener.Close() //nolint:errcheck // it was never used
	return listener.Addr().String(), nil
}
