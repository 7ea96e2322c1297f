// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// waitDelay is how long a program that was killed, or a child of it that holds its output, is waited for.
	waitDelay = 5 * time.Second
	// stderrTail is how much of a failed program's stderr its error shows, in bytes.
	stderrTail = 512
)

// Exec is the Runner of the operating system. Each program runs in a process group of its own.
type Exec struct{}

// Run implements Runner.
func (Exec) Run(ctx context.Context, c Command) (string, error) {
	cmd := exec.CommandContext(ctx, c.Path, c.Args...) //nolint:gosec // running programs is what it is for; there is no shell
	cmd.Env = append([]string{}, c.Env...)             // not nil, which would mean our own environment
	cmd.Stdin = strings.NewReader(c.Stdin)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = waitDelay
	if c.Daemon {
		return "", runDaemon(ctx, cmd)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), failure(ctx, cmd, err, stderr.String())
	}
	return stdout.String(), nil
}

// runDaemon collects stderr in a file rather than through a pipe: the daemon that stays may keep it open, and a pipe
// whose reader has gone would kill it.
func runDaemon(ctx context.Context, cmd *exec.Cmd) error {
	stderr, err := os.CreateTemp("", "stderr-")
	if err != nil {
		return fmt.Errorf("collecting the output of %s: %w", filepath.Base(cmd.Path), err)
	}
	defer stderr.Close()           //nolint:errcheck // nothing of it is needed any more
	defer os.Remove(stderr.Name()) //nolint:errcheck // a left-over temporary file harms nobody
	cmd.Stderr = stderr
	if err := cmd.Run(); err != nil {
		return failure(ctx, cmd, err, readAll(stderr))
	}
	return nil
}

func readAll(f *os.File) string {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return ""
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return ""
	}
	return string(data)
}

// failure names the program, how it ended and what it last said. It wraps the context's error if that was the cause.
func failure(ctx context.Context, cmd *exec.Cmd, err error, stderr string) error {
	program := filepath.Base(cmd.Path)
	said := tail(strings.TrimSpace(stderr))
	if ctx.Err() != nil {
		return fmt.Errorf("running %s: %w, so it was killed%s", program, context.Cause(ctx), said)
	}
	if _, ran := errors.AsType[*exec.ExitError](err); ran {
		return fmt.Errorf("running %s: %w%s", program, err, said)
	}
	return fmt.Errorf("starting %s: %w%s", program, err, said)
}

func tail(said string) string {
	if said == "" {
		return ""
	}
	if len(said) > stderrTail {
		said = "…" + strings.ToValidUTF8(said[len(said)-stderrTail:], "")
	}
	return ": " + said
}
