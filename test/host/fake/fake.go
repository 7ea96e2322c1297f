// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fake simulates a host: programs that tests supply, processes and a boot id. It records what was asked, in
// order, and fails on request.
package fake

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// Program is what a program does when it is run.
type Program func(ctx context.Context, c host.Command) (stdout string, err error)

// Runner is a host.Runner. It knows the programs that were added and refuses others, as a host does.
type Runner struct {
	mu       sync.Mutex
	programs map[string]Program
	commands []host.Command
	fail     func(host.Command) error
	swap     func(host.Command) host.Command
}

// NewRunner makes a runner without programs.
func NewRunner() *Runner { return &Runner{programs: map[string]Program{}} }

// Add makes a program known by its base name.
func (r *Runner) Add(name string, p Program) *Runner {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.programs[name] = p
	return r
}

// Fail asks f before each command; an error that it returns is the result, and the program is not run. Nil ends that.
func (r *Runner) Fail(f func(host.Command) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail = f
}

// Swap runs what f makes of a command in its place. Nil ends that.
func (r *Runner) Swap(f func(host.Command) host.Command) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.swap = f
}

// Run implements host.Runner.
func (r *Runner) Run(ctx context.Context, c host.Command) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("running %s: %w", path.Base(c.Path), err)
	}
	program, fail, swap := r.record(c)
	if swap != nil {
		c = swap(c)
	}
	if fail != nil {
		if err := fail(c); err != nil {
			return "", fmt.Errorf("running %s: %w", path.Base(c.Path), err)
		}
	}
	if program == nil {
		return "", fmt.Errorf("starting %s: no such file or directory", path.Base(c.Path))
	}
	stdout, err := program(ctx, c)
	if err != nil {
		return stdout, fmt.Errorf("running %s: %w", path.Base(c.Path), err)
	}
	return stdout, nil
}

func (r *Runner) record(c host.Command) (Program, func(host.Command) error, func(host.Command) host.Command) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.commands = append(r.commands, c)
	return r.programs[path.Base(c.Path)], r.fail, r.swap
}

// Commands are those that were run, in order.
func (r *Runner) Commands() []host.Command {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.commands)
}

// Lines are the commands as text, in order: base name, arguments and, after a <, what was written to stdin.
func (r *Runner) Lines() []string {
	var lines []string
	for _, c := range r.Commands() {
		line := strings.Join(append([]string{path.Base(c.Path)}, c.Args...), " ")
		if c.Stdin != "" {
			line += " < " + strings.TrimSpace(c.Stdin)
		}
		lines = append(lines, line)
	}
	return lines
}

// Processes is a host.Processes and a host.Boot.
type Processes struct {
	mu     sync.Mutex
	byPID  map[int]host.Process
	bootID string
	err    error
}

// NewProcesses makes a host without processes, in the boot with that id.
func NewProcesses(bootID string) *Processes {
	return &Processes{byPID: map[int]host.Process{}, bootID: bootID}
}

// Set says what a process is; the zero value ends it.
func (p *Processes) Set(pid int, process host.Process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if process == (host.Process{}) {
		delete(p.byPID, pid)
		return
	}
	p.byPID[pid] = process
}

// Reboot ends all processes; the boot id is a new one.
func (p *Processes) Reboot(bootID string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.byPID, p.bootID = map[int]host.Process{}, bootID
}

// FailID makes ID fail until it is called with nil.
func (p *Processes) FailID(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

// Describe implements host.Processes.
func (p *Processes) Describe(pid int) host.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.byPID[pid]
}

// ID implements host.Boot.
func (p *Processes) ID() (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bootID, p.err
}

// Rebooter is a host.Rebooter: the node boots anew when it is asked to, unless it fails.
type Rebooter struct {
	// Boot boots the node.
	Boot func()

	mu        sync.Mutex
	requested int
	refusal   error
	fail      error
}

// Refuse says why the node cannot be rebooted; nil: it can.
func (r *Rebooter) Refuse(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refusal = err
}

// Fail makes Reboot fail until it is called with nil: the node goes on running.
func (r *Rebooter) Fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail = err
}

// Requested is how often the node was asked to reboot.
func (r *Rebooter) Requested() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.requested
}

// Able implements host.Rebooter.
func (r *Rebooter) Able() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refusal
}

// Reboot implements host.Rebooter.
func (r *Rebooter) Reboot() error {
	if err := r.Able(); err != nil {
		return err
	}
	r.mu.Lock()
	r.requested++
	err := r.fail
	r.mu.Unlock()
	if err == nil {
		r.Boot()
	}
	return err
}
