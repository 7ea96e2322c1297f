// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fake simulates NVIDIA's MPS control daemons, the node around them and the passing of time. The daemons follow
// the rules of package sim, and so refuse what the real program refuses.
package fake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/test/mps/sim"
)

// Daemons are the MPS control daemons of a node, by pipe directory, and the processes around them.
type Daemons struct {
	mu        sync.Mutex
	byPipe    map[string]*daemon
	processes map[int]process
	lastPID   int
	started   int // daemons so far
}

type daemon struct {
	*sim.Daemon
	pid  int
	logs string
}

// process is a process of the node.
type process struct {
	uid    int64
	host   host.Process
	pipe   string // its CUDA_MPS_PIPE_DIRECTORY
	named  bool   // it only says so: the pipe directory is not mounted in its container
	daemon bool   // on the node, where the pipe directory has its own path
	asks   bool   // it is no daemon itself
}

// NewDaemons makes a node on which none runs.
func NewDaemons() *Daemons {
	return &Daemons{byPipe: map[string]*daemon{}, processes: map[int]process{}, lastPID: 5000}
}

// Program is nvidia-cuda-mps-control, for a host's fake Runner.
func (d *Daemons) Program(ctx context.Context, c host.Command) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	pipe := variable(c.Env, "CUDA_MPS_PIPE_DIRECTORY")
	if len(c.Args) > 0 {
		return "", d.start(pipe, variable(c.Env, "CUDA_MPS_LOG_DIRECTORY"), c.Args)
	}
	daemon, runs := d.byPipe[pipe]
	if !runs {
		return "", errors.New("exit status 1: Cannot find MPS control daemon process")
	}
	if daemon.Quitting {
		return "", errors.New("exit status 1: Cannot send command to MPS control daemon process")
	}
	var answers strings.Builder
	for line := range strings.Lines(c.Stdin) {
		answer, quit := daemon.Tell(line)
		if answer != "" {
			answers.WriteString(strings.TrimSuffix(answer, "\n") + "\n")
		}
		if !quit {
			continue
		}
		if daemon.Clients() > 0 { // it waits for them, longer than anybody waits for it
			return "", fmt.Errorf("killed: %w", context.DeadlineExceeded)
		}
		d.end(pipe)
	}
	return answers.String(), ctx.Err()
}

// Answering is Program, except for its answer to one command.
func (d *Daemons) Answering(command, answer string) func(context.Context, host.Command) (string, error) {
	return func(ctx context.Context, c host.Command) (string, error) {
		if strings.TrimSpace(c.Stdin) == command {
			return answer, nil
		}
		return d.Program(ctx, c)
	}
}

func (d *Daemons) start(pipe, logs string, args []string) error {
	multiUser := slices.Equal(args, []string{"-d", "-multiuser-server"})
	if !multiUser && !slices.Equal(args, []string{"-d"}) {
		return fmt.Errorf("exit status 1: usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server], not %q", args)
	}
	if _, runs := d.byPipe[pipe]; runs {
		return errors.New("exit status 1: An instance of this daemon is already running")
	}
	for _, dir := range []string{pipe, logs} {
		if info, err := os.Stat(dir); err != nil || !info.IsDir() {
			return fmt.Errorf("exit status 1: failed to open %q", dir)
		}
	}
	d.started++
	d.byPipe[pipe] = &daemon{Daemon: sim.New(d, multiUser), pid: d.started, logs: logs}
	d.processes[d.started] = process{host: host.Process{Name: "nvidia-cuda-mps-control", HostPIDs: true}, pipe: pipe, daemon: true}
	return nil
}

// end ends a daemon with its servers.
func (d *Daemons) end(pipe string) {
	daemon := d.byPipe[pipe]
	daemon.Close()
	delete(d.byPipe, pipe)
	delete(d.processes, daemon.pid)
}

// StartServer implements sim.Node.
func (d *Daemons) StartServer(uid int) (int, error) {
	d.lastPID++
	d.processes[d.lastPID] = process{uid: int64(uid), host: host.Process{Name: "nvidia-cuda-mps-server", HostPIDs: true}}
	return d.lastPID, nil
}

// EndServer implements sim.Node.
func (d *Daemons) EndServer(pid int) { delete(d.processes, pid) }

// EndClient implements sim.Node.
func (d *Daemons) EndClient(pid int) { delete(d.processes, pid) }

// Run starts a process of a pod that was given a pipe directory. It uses no GPU yet.
func (d *Daemons) Run(pipe, podUID string, uid int) (pid int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lastPID++
	d.processes[d.lastPID] = process{uid: int64(uid), host: host.Process{Name: "python", PodUID: podUID}, pipe: pipe}
	return d.lastPID
}

// Name starts a process of a pod that names a pipe directory which nobody has given to it: any pod may set a variable.
func (d *Daemons) Name(pipe, podUID string, uid int) (pid int) {
	pid = d.Run(pipe, podUID, uid)
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.processes[pid]
	p.named = true
	d.processes[pid] = p
	return pid
}

// Pretend starts a process of a pod that looks like a daemon of the node in all that a container chooses: its name, its
// arguments and its environment.
func (d *Daemons) Pretend(pipe, podUID string) (pid int) {
	pid = d.Name(pipe, podUID, 0)
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.processes[pid]
	p.daemon, p.host.Name = true, "nvidia-cuda-mps-control"
	d.processes[pid] = p
	return pid
}

// Ask starts a program that asks the daemon at a pipe directory.
func (d *Daemons) Ask(pipe string) (pid int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.started++
	d.processes[d.started] = process{
		host: host.Process{Name: "nvidia-cuda-mps-control", HostPIDs: true}, pipe: pipe, daemon: true, asks: true,
	}
	return d.started
}

// Connect makes a process a client of the daemon at its pipe directory, and returns the limits that it got. A client
// that has to wait is not served, which is no error.
func (d *Daemons) Connect(pid int) (limits sim.Limits, served bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.processes[pid]
	daemon, runs := d.byPipe[p.pipe]
	if !runs {
		return sim.Limits{}, false, errors.New("CUDA_ERROR_MPS_CONNECTION_FAILED")
	}
	return daemon.Connect(pid, int(p.uid))
}

// End ends a process.
func (d *Daemons) End(pid int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.processes[pid]
	delete(d.processes, pid)
	if daemon, runs := d.byPipe[p.pipe]; runs {
		daemon.Disconnect(pid)
		if daemon.Quitting && daemon.Clients() == 0 {
			d.end(p.pipe)
		}
	}
}

// Fault is a fatal fault of a client.
func (d *Daemons) Fault(pid int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.byPipe[d.processes[pid].pipe].Fault(pid)
}

// Describe implements host.Processes.
func (d *Daemons) Describe(pid int) host.Process {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.processes[pid].host
}

// User implements host.Users.
func (d *Daemons) User(pid int) (int64, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p, runs := d.processes[pid]
	return p.uid, runs
}

// WithVariable implements host.Users.
func (d *Daemons) WithVariable(name string) (map[int]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	found := map[int]string{}
	for pid, p := range d.processes {
		switch {
		case name != "CUDA_MPS_PIPE_DIRECTORY" || p.pipe == "":
		case p.daemon:
			found[pid] = p.pipe
		default:
			found[pid] = filepath.Join("/mps", filepath.Base(filepath.Dir(filepath.Dir(p.pipe))), filepath.Base(filepath.Dir(p.pipe)), "pipe")
		}
	}
	return found, nil
}

// Mounted implements host.Mounts.
func (d *Daemons) Mounted(folders ...string) (map[string][]int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	found := map[string][]int{}
	for pid, p := range d.processes {
		if !p.daemon && !p.named && slices.Contains(folders, p.pipe) {
			found[p.pipe] = append(found[p.pipe], pid)
		}
	}
	return found, nil
}

// Trim implements host.Trimmer. The pipe directories of the daemons that are simulated are small.
func (d *Daemons) Trim(string, int64, int, bool) (int64, error) { return 0, nil }

// Arguments implements host.Programs.
func (d *Daemons) Arguments(pid int) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch p := d.processes[pid]; {
	case p.asks:
		return []string{p.host.Name}
	case p.daemon:
		return []string{p.host.Name, "-d"}
	}
	return nil
}

// Kill implements host.Programs.
func (d *Daemons) Kill(pid int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for pipe, daemon := range d.byPipe {
		if daemon.pid == pid {
			d.end(pipe)
		}
	}
	delete(d.processes, pid)
	return nil
}

// Get is a copy of the daemon at a pipe directory; nil if none runs.
func (d *Daemons) Get(pipe string) *sim.Daemon {
	d.mu.Lock()
	defer d.mu.Unlock()
	daemon, runs := d.byPipe[pipe]
	if !runs {
		return nil
	}
	return daemon.Clone()
}

// Log appends to a log of a daemon: control.log or server.log.
func (d *Daemons) Log(pipe, name, text string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	f, err := os.OpenFile(filepath.Join(d.byPipe[pipe].logs, name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("logging: %w", err)
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// Start starts a daemon as another program would.
func (d *Daemons) Start(pipe, logs string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.start(pipe, logs, []string{"-d"})
}

// Crash ends a daemon without a farewell; its files stay.
func (d *Daemons) Crash(pipe string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if daemon, runs := d.byPipe[pipe]; runs {
		delete(d.processes, daemon.pid)
		delete(d.byPipe, pipe)
	}
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

	// Meanwhile is called during each wait.
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
