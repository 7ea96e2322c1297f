// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fake simulates NVIDIA's MPS control daemons and the passing of time. It refuses what the real program refuses.
package fake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpusharing/gpu-sharing-operator/internal/host"
)

// Daemons are the MPS control daemons of a node, by pipe directory.
type Daemons struct {
	mu     sync.Mutex
	byPipe map[string]*Daemon
}

// Daemon is the state of one.
type Daemon struct {
	ActiveThreadPercentage string
	PinnedMemoryLimits     map[string]string // by index of the GPU
	LogDirectory           string
	Commands               []string // all that it was told since it was started
}

// NewDaemons makes a node on which none runs.
func NewDaemons() *Daemons { return &Daemons{byPipe: map[string]*Daemon{}} }

// Program is nvidia-cuda-mps-control, for a host's fake Runner.
func (d *Daemons) Program(_ context.Context, c host.Command) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	pipe := variable(c.Env, "CUDA_MPS_PIPE_DIRECTORY")
	if slices.Equal(c.Args, []string{"-d"}) {
		return "", d.start(pipe, variable(c.Env, "CUDA_MPS_LOG_DIRECTORY"))
	}
	daemon, runs := d.byPipe[pipe]
	if !runs {
		return "", errors.New("exit status 1: cannot find MPS control daemon process")
	}
	var answers strings.Builder
	for line := range strings.Lines(c.Stdin) {
		answer, err := d.tell(pipe, daemon, strings.Fields(line))
		if err != nil {
			return "", err
		}
		answers.WriteString(answer)
	}
	return answers.String(), nil
}

func (d *Daemons) start(pipe, logs string) error {
	if _, runs := d.byPipe[pipe]; runs {
		return errors.New("exit status 1: an instance of this daemon is already running")
	}
	for _, dir := range []string{pipe, logs} {
		if info, err := os.Stat(dir); err != nil || !info.IsDir() {
			return fmt.Errorf("exit status 1: failed to open %q", dir)
		}
	}
	d.byPipe[pipe] = &Daemon{ActiveThreadPercentage: "100.0", PinnedMemoryLimits: map[string]string{}, LogDirectory: logs}
	return nil
}

func (d *Daemons) tell(pipe string, daemon *Daemon, words []string) (string, error) {
	daemon.Commands = append(daemon.Commands, strings.Join(words, " "))
	switch {
	case len(words) == 1 && words[0] == "get_default_active_thread_percentage":
		return daemon.ActiveThreadPercentage + "\n", nil
	case len(words) == 2 && words[0] == "set_default_active_thread_percentage":
		daemon.ActiveThreadPercentage = words[1] + ".0"
		return daemon.ActiveThreadPercentage + "\n", nil
	case len(words) == 3 && words[0] == "set_default_device_pinned_mem_limit":
		daemon.PinnedMemoryLimits[words[1]] = words[2]
		return "", nil
	case len(words) == 1 && words[0] == "quit":
		delete(d.byPipe, pipe)
		return "", nil
	}
	return "", fmt.Errorf("exit status 1: unknown command %q", strings.Join(words, " "))
}

// Get is a copy of the daemon at a pipe directory; nil if none runs.
func (d *Daemons) Get(pipe string) *Daemon {
	d.mu.Lock()
	defer d.mu.Unlock()
	daemon, runs := d.byPipe[pipe]
	if !runs {
		return nil
	}
	clone := *daemon
	clone.PinnedMemoryLimits, clone.Commands = maps.Clone(daemon.PinnedMemoryLimits), slices.Clone(daemon.Commands)
	return &clone
}

// Start starts a daemon as somebody else would.
func (d *Daemons) Start(pipe, logs string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.start(pipe, logs)
}

// Kill ends a daemon without a farewell; its files stay.
func (d *Daemons) Kill(pipe string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.byPipe, pipe)
}

func variable(env []string, name string) string {
	for _, v := range env {
		if value, found := strings.CutPrefix(v, name+"="); found {
			return value
		}
	}
	return ""
}

// Clock jumps: a wait takes no time, but the clock has moved on, and what others do in the meantime is done.
type Clock struct {
	*clocktesting.FakeClock

	// Meanwhile is called while somebody waits.
	Meanwhile func()
}

// NewClock makes a clock that stands at a time.
func NewClock(now time.Time) *Clock { return &Clock{FakeClock: clocktesting.NewFakeClock(now)} }

// After implements clock.Clock.
func (c *Clock) After(d time.Duration) <-chan time.Time {
	c.Step(d)
	if c.Meanwhile != nil {
		c.Meanwhile()
	}
	passed := make(chan time.Time, 1)
	passed <- c.Now()
	return passed
}
