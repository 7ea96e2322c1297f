// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"
)

// process is a program of the demo, in a process group of its own. What it writes goes to a file.
type process struct {
	cmd    *exec.Cmd
	done   chan struct{}
	health string // URL of its readiness probe; empty: it is ready when it runs
}

// start starts a program. The environment is what env names and the demo's marker.
func start(logFile, path string, args, env []string) (*process, error) {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", path, err)
	}
	defer log.Close() //nolint:errcheck // the child writes it
	p := &process{cmd: exec.Command(path, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = slices.Concat(env, []string{marker + "=" + os.Getenv(marker)})
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", path, err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Alive implements nodesim.Program.
func (p *process) Alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Ready implements nodesim.Program.
func (p *process) Ready(ctx context.Context) bool {
	if p.health == "" {
		return p.Alive()
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.health, nil)
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

// Stop implements nodesim.Program: it asks, and insists after a while.
func (p *process) Stop() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(5 * time.Second):
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.done
	}
}

// freeAddress is an address of loopback that nobody listens on.
func freeAddress(ctx context.Context) (string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("finding a free port: %w", err)
	}
	defer listener.Close() //nolint:errcheck // it was never used
	return listener.Addr().String(), nil
}
