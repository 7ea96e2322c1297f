// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// logs is where programs and pods write.
	logs = "/var/log"
	// stopAfter is how long a program may take to stop.
	stopAfter = 5 * time.Second
	// upAfter is how long a program may take until it does its work; etcd and the API server need seconds on an idle
	// machine, and minutes are for one that is not.
	upAfter = 3 * time.Minute
	// poll is how often one looks.
	poll = 100 * time.Millisecond
	// tail is how much of a log is shown when a program fails.
	tail = 3000
)

var getOptions = metav1.GetOptions{}

// program is a running program that writes to a log of its own.
type program struct {
	name    string
	cmd     *exec.Cmd
	started time.Time
	ended   chan struct{}
}

// run starts a program of the node's.
func (n *Node) run(name string, args ...string) (*program, error) {
	log, err := os.OpenFile(filepath.Join(logs, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening the log of %s: %w", name, err)
	}
	defer log.Close() //nolint:errcheck // the program writes it
	cmd := exec.Command(n.program(name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	// Containerd finds its shim, and the kubelet its tools, beside them.
	cmd.Env = append(os.Environ(), "PATH="+n.options.Bin+":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C comes to us, and we stop them in order
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	p := &program{name: name, cmd: cmd, started: time.Now(), ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ended stands in ProcessState
		close(p.ended)
	}()
	n.programs = append(n.programs, p)
	return p, nil
}

// runs reports whether a program has not ended.
func (p *program) runs() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

func (p *program) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stopping %s: %w", p.name, err)
	}
	select {
	case <-p.ended:
		return nil
	case <-time.After(stopAfter):
	}
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing %s: %w", p.name, err)
	}
	<-p.ended
	return nil
}

// waitFor waits until a finding holds, as long as the program that must bring it about lives.
func (n *Node) waitFor(ctx context.Context, p *program, what string, finding func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, upAfter)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		err := finding(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.ended:
			return fmt.Errorf("waiting for %s: %s has ended (%s); the end of its log:\n%s", what, p.name, p.cmd.ProcessState, p.logTail())
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w; the end of the log of %s:\n%s", what, err, p.name, p.logTail())
		}
	}
}

func (p *program) logTail() string {
	data, err := os.ReadFile(filepath.Join(logs, p.name+".log"))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(data[max(0, len(data)-tail):]))
}
