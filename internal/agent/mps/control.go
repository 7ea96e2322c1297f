// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

const (
	controlProgram = "nvidia-cuda-mps-control"

	commandTimeout = 10 * time.Second // of one command to a daemon that answers
	askTimeout     = 3 * time.Second  // of a question, which a daemon that hangs never answers
	killTimeout    = 6 * time.Second  // of the end of a program that was killed: more than what its output is waited for

	// socketName is the name of a daemon's socket in its pipe directory.
	socketName = "control"
	// maxQuoted is how much of an answer an error shows, in bytes.
	maxQuoted = 128
	// maxPIDs is how many servers, or clients of a server, a daemon may name: NVIDIA's server takes 48 clients.
	maxPIDs = 1024
)

// errReplaced says that what answers is not the daemon.
var errReplaced = fmt.Errorf("another process is in the place of the %w, as root in a container of a client can put it there: "+
	"end the pods that use MPS on this node", ErrDaemon)

// startPace is how a daemon is waited for that was started, or told to quit.
func startPace() pace { return pace{every: 100 * time.Millisecond, atMost: 15 * time.Second} }

// Listeners tells who listens at a socket; see host.Proc.Listener.
type Listeners interface {
	Listener(socket string) (host.Listener, error)
}

// Control speaks with MPS control daemons through NVIDIA's program. Their pipe directories are mounted in the containers
// of their clients, in which root may put there what it likes. So who answers is looked at first, no answer is believed
// beyond its range, and no question is waited for that does not end when it is told to.
type Control struct {
	runner    host.Runner
	clock     clock.Clock
	files     files
	listeners Listeners // nil: each answer is believed
	lost      *lost
}

// NewControl makes a control with an MPS root, whose name must be an absolute path. The runner finds NVIDIA's program
// by its name.
func NewControl(runner host.Runner, root *os.Root, clk clock.Clock) Control {
	return Control{runner: runner, clock: clk, files: files{root: root}, lost: newLost()}
}

// By is the control that believes a daemon only after a look at who listens.
func (c Control) By(listeners Listeners) Control {
	c.listeners = listeners
	return c
}

// Start starts a daemon, waits until it answers and sets its limits.
func (c Control) Start(ctx context.Context, d plan.Daemon) error {
	for _, dir := range []string{PipeFolder, "log"} {
		if err := c.files.root.MkdirAll(path.Join(d.Resource, dir), dirMode); err != nil {
			return fmt.Errorf("making %s: %w", c.files.path(d.Resource, dir), err)
		}
	}
	command := c.command(d.Resource)
	command.Args, command.Daemon = []string{"-d"}, true
	if d.MultiUser {
		command.Args = append(command.Args, "-multiuser-server")
	}
	if _, err := c.run(ctx, d.Resource, command, commandTimeout); err != nil {
		return err
	}
	if err := c.await(ctx, d.Resource, true); err != nil {
		return err
	}
	return c.Limit(ctx, d)
}

// Limit sets the limits of the daemon that runs: the defaults first, which servers to come copy, then those of each
// server, which its clients to come copy. It reads each limit back, because the daemon reports a refusal as an answer
// like any other.
func (c Control) Limit(ctx context.Context, d plan.Daemon) error {
	for _, l := range limitsOf(d) {
		if err := c.set(ctx, d.Resource, l.ofDaemon()); err != nil {
			return err
		}
	}
	servers, err := c.servers(ctx, d.Resource)
	if err != nil {
		return err
	}
	for _, server := range servers {
		if err := c.limitServer(ctx, d, server); err != nil {
			return err
		}
	}
	return c.files.mark(path.Join(d.Resource, startedMarker), true)
}

// limitServer sets the limits of a server. One that ends meanwhile needs none.
func (c Control) limitServer(ctx context.Context, d plan.Daemon, server int) error {
	for _, l := range limitsOf(d) {
		failed := c.set(ctx, d.Resource, l.ofServer(server))
		if failed == nil {
			continue
		}
		servers, err := c.servers(ctx, d.Resource)
		if err == nil && !slices.Contains(servers, server) {
			return nil
		}
		return errors.Join(failed, err)
	}
	return nil
}

// set sets one limit and reads it back.
func (c Control) set(ctx context.Context, resource string, l setting) error {
	answer, err := c.tell(ctx, resource, l.set, commandTimeout)
	if err != nil {
		return fmt.Errorf("limiting the daemon with %q: %w", l.set, err)
	}
	now, err := c.tell(ctx, resource, l.get, commandTimeout)
	if err != nil {
		return fmt.Errorf("reading the limit %q: %w", l.get, err)
	}
	if !l.holds(now) {
		return fmt.Errorf("limiting the daemon with %q: it answered %s, and %q still answers %s", l.set, quoted(answer), l.get, quoted(now))
	}
	return nil
}

// Limited reports whether the daemon still has the limits. An error means that it does not answer.
func (c Control) Limited(ctx context.Context, d plan.Daemon) (bool, error) {
	for _, l := range limitsOf(d) {
		get := l.ofDaemon()
		now, err := c.tell(ctx, d.Resource, get.get, askTimeout)
		if err != nil {
			return false, err
		}
		if !get.holds(now) {
			return false, nil
		}
	}
	return true, nil
}

// Ask asks a daemon for the percentage of threads that a client gets: NVIDIA's own question whether it is there. An
// error means that it does not answer, or that another process answers in its place.
func (c Control) Ask(ctx context.Context, resource string) (int, error) {
	if err := c.checkListener(resource); err != nil {
		return 0, err
	}
	answer, err := c.tell(ctx, resource, "get_default_active_thread_percentage", askTimeout)
	if err != nil {
		return 0, err
	}
	percentage, err := strconv.ParseFloat(strings.TrimSpace(answer), 64)
	if err != nil || math.IsNaN(percentage) || percentage < 1 || percentage > 100 {
		return 0, fmt.Errorf("%s for %s answered %s instead of a percentage", controlProgram, resource, quoted(answer))
	}
	return int(percentage), nil
}

// checkListener fails if a process of a container listens in the daemon's place. The daemon is where it sees the PIDs of
// its clients, in the host's PID namespace. Where the process that began to listen has ended, as a daemon may leave the
// process that started it, the socket must be the one that was there once the MPS pod had started the daemon.
func (c Control) checkListener(resource string) error {
	now, err := c.listener(resource)
	if err != nil {
		return fmt.Errorf("%w: %w", errReplaced, err)
	}
	if now.Known && !now.Process.HostPIDs {
		return fmt.Errorf("%w: pod %s listens there", errReplaced, cmp.Or(now.Process.PodUID, "that is not known"))
	}
	if now.Known || now.Socket == (host.FileID{}) {
		return nil
	}
	was, _, err := c.files.record(resource)
	if err == nil && was.Socket != (host.FileID{}) && was.Socket != now.Socket {
		return fmt.Errorf("%w: a process that has ended made the socket there", errReplaced)
	}
	return err
}

// listener is who listens in the pipe directory of a resource. Nothing, if that is not looked at.
func (c Control) listener(resource string) (host.Listener, error) {
	if c.listeners == nil {
		return host.Listener{Known: true, Process: host.Process{HostPIDs: true}}, nil
	}
	return c.listeners.Listener(c.files.path(resource, PipeFolder, socketName)) //nolint:wrapcheck // names the socket
}

// quoted is an answer as an error shows it.
func quoted(answer string) string {
	answer = strings.TrimSpace(answer)
	if len(answer) > maxQuoted {
		answer = strings.ToValidUTF8(answer[:maxQuoted], "") + "…"
	}
	return strconv.Quote(answer)
}

// Servers are the servers of a daemon with their clients.
func (c Control) Servers(ctx context.Context, resource string) ([]Server, error) {
	pids, err := c.servers(ctx, resource)
	if err != nil {
		return nil, err
	}
	servers := make([]Server, 0, len(pids))
	for _, pid := range pids {
		clients, err := c.pids(ctx, resource, fmt.Sprintf("get_client_list %d", pid))
		if err != nil {
			return nil, err
		}
		servers = append(servers, Server{PID: pid, Clients: clients})
	}
	return servers, nil
}

func (c Control) servers(ctx context.Context, resource string) ([]int, error) {
	return c.pids(ctx, resource, "get_server_list")
}

// pids are the process IDs in an answer, one on each line, sorted. Other lines are what the daemon says of a server
// that has ended meanwhile.
func (c Control) pids(ctx context.Context, resource, question string) ([]int, error) {
	answer, err := c.tell(ctx, resource, question, askTimeout)
	if err != nil {
		return nil, err
	}
	var pids []int
	for line := range strings.Lines(answer) {
		if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
		if len(pids) > maxPIDs {
			return nil, fmt.Errorf("%s for %s answered %q with more than %d processes", controlProgram, resource, question, maxPIDs)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

// EndServer ends a server without clients. The next client starts another one.
func (c Control) EndServer(ctx context.Context, resource string, pid int) error {
	if _, err := c.tell(ctx, resource, fmt.Sprintf("shutdown_server %d", pid), commandTimeout); err != nil {
		return fmt.Errorf("ending the MPS server %d of %s: %w", pid, resource, err)
	}
	return nil
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
	err := startPace().poll(ctx, c.clock, func() (bool, error) {
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
	return c.run(ctx, resource, command, timeout)
}

// run runs NVIDIA's program. One that does not end, though it was killed, is left behind: a link in the place of the
// daemon's socket may lead it to a file system that answers to nobody. Until it has ended, no other is run for the
// resource.
func (c Control) run(ctx context.Context, resource string, command host.Command, timeout time.Duration) (string, error) {
	if c.lost.has(resource) {
		return "", fmt.Errorf("%w: a former %s for %s was killed and has not ended", ErrDaemon, controlProgram, resource)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	type result struct {
		stdout string
		err    error
	}
	done := make(chan result, 1)
	go func() {
		defer cancel()
		stdout, err := c.runner.Run(ctx, command)
		done <- result{stdout, err}
		c.lost.set(resource, false)
	}()
	select {
	case r := <-done:
		return r.stdout, r.err
	case <-ctx.Done():
	}
	c.lost.set(resource, true)
	select {
	case r := <-done:
		c.lost.set(resource, false)
		return r.stdout, r.err
	case <-clock.RealClock{}.After(killTimeout): // of the machine: a simulated clock does not know how long a kill takes
		return "", fmt.Errorf("%w: %s for %s was killed and does not end: %w", ErrDaemon, controlProgram, resource, context.Cause(ctx))
	}
}

// lost are the resources for which something has not ended.
type lost struct {
	mu        sync.Mutex
	resources map[string]bool
}

func newLost() *lost { return &lost{resources: map[string]bool{}} }

func (l *lost) has(resource string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.resources[resource]
}

func (l *lost) set(resource string, is bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.resources[resource] = is
}

func (c Control) command(resource string) host.Command {
	return host.Command{
		Path: controlProgram,
		Env: []string{
			pipeVariable + "=" + c.files.path(resource, PipeFolder),
			"CUDA_MPS_LOG_DIRECTORY=" + c.files.path(resource, "log"),
		},
	}
}

// pace is how often something is looked at, and for how long at most.
type pace struct{ every, atMost time.Duration }

// poll looks until done says so. Once the time is over or the context has ended, the error is that and the last one of
// done, which tells why it never was.
func (p pace) poll(ctx context.Context, clk clock.Clock, done func() (bool, error)) error {
	deadline := clk.Now().Add(p.atMost)
	for {
		ok, err := done()
		if ok {
			return nil
		}
		if !clk.Now().Before(deadline) {
			return because(fmt.Errorf("waited %s", p.atMost), err)
		}
		select {
		case <-ctx.Done():
			return because(context.Cause(ctx), err)
		case <-clk.After(p.every):
		}
	}
}

// because adds the last reason to the end of a wait, if there is one.
func because(end, last error) error {
	if last == nil {
		return end
	}
	return fmt.Errorf("%w: %w", end, last)
}
