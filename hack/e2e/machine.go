// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/onsi/ginkgo/v2/types"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/turns"
)

// patience is how long a machine that is told to end has for it: it clears up, and keeps logs.
const patience = 2 * time.Minute

// machine runs a part of the specs.
type machine struct {
	options
	name      string
	focus     string
	arguments []string
	turns     turns.Turns
}

func (m machine) folder() string { return filepath.Join(m.last, m.name) }
func (m machine) report() string { return filepath.Join(m.folder(), "report.json") }
func (m machine) log() string    { return filepath.Join(m.folder(), "log") }

// run runs the specs of the machine. What it prints of each spec goes to progress, everything else to its log. That a
// spec failed is no error; the report has it.
func (m machine) run(ctx context.Context, progress io.Writer) error {
	if err := os.MkdirAll(m.folder(), 0o750); err != nil {
		return fmt.Errorf("making a folder for the machine: %w", err)
	}
	log, err := os.Create(m.log())
	if err != nil {
		return fmt.Errorf("making the log of the machine: %w", err)
	}
	defer log.Close() //nolint:errcheck // what is lost of it is said by nobody else
	arguments := append([]string{
		"-test.v", "-test.timeout=100m", "-ginkgo.v", "-ginkgo.no-color", "-ginkgo.timeout=95m",
		"-ginkgo.json-report=" + m.report(), "-ginkgo.focus=" + m.focus, "-ginkgo.label-filter=" + m.labels,
	}, m.arguments...)
	cmd := exec.CommandContext(ctx, m.test, arguments...) //nolint:gosec // the program that the Makefile names
	cmd.Dir = filepath.Join(filepath.Dir(m.test), "..", "..", "test", "e2e")
	cmd.Env = append(os.Environ(), "GPUSHARING_E2E=1")
	if !m.turns.Until.IsZero() {
		raw, err := json.Marshal(m.turns)
		if err != nil {
			return fmt.Errorf("writing the turns of the machine: %w", err)
		}
		cmd.Env = append(cmd.Env, turns.Variable+"="+string(raw))
	}
	if m.logs {
		cmd.Env = append(cmd.Env, "GPUSHARING_E2E_LOGS="+m.folder())
	}
	cmd.Stdout, cmd.Stderr = log, log
	if progress != nil {
		cmd.Stderr = io.MultiWriter(log, progress)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C comes once, from here
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = patience
	err = cmd.Run()
	var exit *exec.ExitError
	if _, missing := os.Stat(m.report()); errors.As(err, &exit) && missing == nil && ctx.Err() == nil {
		return nil
	}
	if err != nil {
		text, _ := os.ReadFile(m.log()) // without it the error has to do
		return fmt.Errorf("machine %s: %w\n%s", m.name, err, lastLines(string(text), 40))
	}
	return nil
}

// play runs each hand on a machine of its own, and returns the reports of all.
func play(ctx context.Context, o options, hands []hand) ([]types.Report, error) {
	var running sync.WaitGroup
	failures := make([]error, len(hands))
	machines := make([]machine, len(hands))
	var terminal sync.Mutex
	for i, h := range hands {
		machines[i] = machine{options: o, name: strconv.Itoa(i + 1), focus: only(h.specs()), turns: h.turns}
		running.Go(func() {
			lines, end := prefixed(machines[i].name+"| ", &terminal)
			failures[i] = machines[i].run(ctx, lines)
			end()
		})
	}
	running.Wait()
	var reports []types.Report
	for i, m := range machines {
		of, err := read(m.report())
		failures[i] = errors.Join(failures[i], err)
		reports = append(reports, of...)
	}
	return reports, errors.Join(failures...)
}

// prefixed returns a writer whose lines are printed with a prefix, whole, and what waits until all are printed.
func prefixed(prefix string, terminal *sync.Mutex) (io.Writer, func()) {
	from, to := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for s := bufio.NewScanner(from); s.Scan(); {
			terminal.Lock()
			say(prefix + s.Text() + "\n")
			terminal.Unlock()
		}
		_, _ = io.Copy(io.Discard, from) // what the scanner gave up on must not hold the machine up
	}()
	return to, func() {
		_ = to.Close() // a pipe closes
		<-done
	}
}
