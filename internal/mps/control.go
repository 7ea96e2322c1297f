// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

const (
	controlProgram = "nvidia-cuda-mps-control"

	commandTimeout = 10 * time.Second // of one command to a daemon that answers
	askTimeout     = 3 * time.Second  // of a question, which a daemon that hangs never answers
)

// settling is how a daemon is waited for that was started, or told to quit.
func settling() pace { return pace{every: 100 * time.Millisecond, atMost: 15 * time.Second} }

// Control speaks with MPS control daemons through NVIDIA's program.
type Control struct {
	runner host.Runner
	driver host.DriverRoot
	clock  clock.Clock
	files  files
}

// NewControl makes a control with an MPS root, whose name must be an absolute path.
func NewControl(runner host.Runner, driver host.DriverRoot, root *os.Root, clk clock.Clock) Control {
	return Control{runner: runner, driver: driver, clock: clk, files: files{root: root}}
}

// Start starts a daemon, waits until it answers and sets its limits.
func (c Control) Start(ctx context.Context, d plan.Daemon) error {
	for _, dir := range []string{"pipe", "log"} {
		if err := c.files.root.MkdirAll(path.Join(d.Resource, dir), dirMode); err != nil {
			return fmt.Errorf("making %s: %w", c.files.path(d.Resource, dir), err)
		}
	}
	command := c.command(d.Resource)
	command.Args, command.Daemon = []string{"-d"}, true
	if _, err := c.run(ctx, command, commandTimeout); err != nil {
		return err
	}
	if err := c.await(ctx, d.Resource, true); err != nil {
		return err
	}
	return c.Limit(ctx, d)
}

// Limit sets the limits of a daemon that runs, in NVIDIA's order: the memory of each GPU, then the threads.
func (c Control) Limit(ctx context.Context, d plan.Daemon) error {
	lines := make([]string, 0, len(d.Devices)+1)
	for _, device := range d.Devices {
		if device.PinnedMemoryLimitMiB > 0 { // the memory of some GPUs is unknown
			lines = append(lines, fmt.Sprintf("set_default_device_pinned_mem_limit %d %dM", device.Index, device.PinnedMemoryLimitMiB))
		}
	}
	lines = append(lines, fmt.Sprintf("set_default_active_thread_percentage %d", d.ActiveThreadPercentage))
	for _, line := range lines {
		if _, err := c.tell(ctx, d.Resource, line, commandTimeout); err != nil {
			return fmt.Errorf("limiting the daemon with %q: %w", line, err)
		}
	}
	return c.files.mark(path.Join(d.Resource, startedMarker), true)
}

// Ask asks a daemon for the percentage of threads that a client gets: NVIDIA's own question whether it is there. An
// error means that it does not answer.
func (c Control) Ask(ctx context.Context, resource string) (int, error) {
	answer, err := c.tell(ctx, resource, "get_default_active_thread_percentage", askTimeout)
	if err != nil {
		return 0, err
	}
	percentage, err := strconv.ParseFloat(strings.TrimSpace(answer), 64)
	if err != nil {
		return 0, fmt.Errorf("%s for %s answered %q instead of a percentage", controlProgram, resource, strings.TrimSpace(answer))
	}
	return int(percentage), nil
}

// ask is Ask for when no answer is an answer: an error means that nobody was asked, since the context has ended.
func (c Control) ask(ctx context.Context, resource string) (percentage int, answers bool, err error) {
	percentage, err = c.Ask(ctx, resource)
	if ended := ctx.Err(); ended != nil {
		return 0, false, fmt.Errorf("asking %w for %s: %w", ErrDaemon, resource, ended)
	}
	return percentage, err == nil, nil
}

// Quit ends a daemon, if it runs, with the servers of its clients, and removes its marker and log, as NVIDIA's does.
func (c Control) Quit(ctx context.Context, resource string) error {
	_, answers, err := c.ask(ctx, resource)
	if err != nil {
		return err
	}
	if answers {
		if _, err := c.tell(ctx, resource, "quit", commandTimeout); err != nil {
			return err
		}
		if err := c.await(ctx, resource, false); err != nil {
			return err
		}
	}
	if err := c.files.remove(path.Join(resource, startedMarker)); err != nil {
		return err
	}
	return c.files.remove(path.Join(resource, "log"))
}

// await waits until a daemon answers, or does not any more.
func (c Control) await(ctx context.Context, resource string, answering bool) error {
	err := settling().poll(ctx, c.clock, func() (bool, error) {
		_, err := c.Ask(ctx, resource)
		return (err == nil) == answering && ctx.Err() == nil, err
	})
	if err != nil && answering {
		return fmt.Errorf("waiting until the daemon answers: %w", err)
	}
	if err != nil {
		return fmt.Errorf("waiting until the daemon is gone: %w", err)
	}
	return nil
}

func (c Control) tell(ctx context.Context, resource, line string, timeout time.Duration) (string, error) {
	command := c.command(resource)
	command.Stdin = line + "\n"
	return c.run(ctx, command, timeout)
}

func (c Control) run(ctx context.Context, command host.Command, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.runner.Run(ctx, command)
}

func (c Control) command(resource string) host.Command {
	return host.Command{
		Path: c.driver.Program(controlProgram),
		Env: append([]string{
			"CUDA_MPS_PIPE_DIRECTORY=" + c.files.path(resource, "pipe"),
			"CUDA_MPS_LOG_DIRECTORY=" + c.files.path(resource, "log"),
		}, c.driver.Env()...),
	}
}
