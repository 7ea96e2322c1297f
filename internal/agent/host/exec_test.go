// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

func script(text string) host.Command {
	return host.Command{Path: "/bin/sh", Args: []string{"-c", text}, Env: []string{"PATH=/usr/bin:/bin"}}
}

func TestExec(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "nvidia-smi")
	tests := map[string]struct {
		command host.Command
		stdout  string
		err     string
	}{
		"returns stdout alone":                      {command: script("echo out; echo err >&2"), stdout: "out\n"},
		"writes stdin":                              {command: withStdin(script("cat"), "get_server_list\n"), stdout: "get_server_list\n"},
		"gives no environment but what was asked":   {command: host.Command{Path: "/usr/bin/env", Env: []string{"A=b"}}, stdout: "A=b\n"},
		"gives no environment at all when none was": {command: host.Command{Path: "/usr/bin/env"}},
		"takes arguments as they are, without a shell": {
			command: host.Command{Path: "/bin/echo", Args: []string{"$HOME; *", "b  c"}}, stdout: "$HOME; * b  c\n",
		},
		"names program, status and stderr of a failure": {
			command: script("echo out; echo 'no such GPU' >&2; exit 3"), stdout: "out\n", err: "running sh: exit status 3: no such GPU",
		},
		"names stdout where stderr says nothing": {
			command: script("echo 'In use by another client'; exit 255"), stdout: "In use by another client\n",
			err: "running sh: exit status 255: In use by another client",
		},
		"shows the end of a long stderr": {
			command: script("i=0; while [ $i -lt 300 ]; do echo line-$i >&2; i=$((i+1)); done; exit 1"),
			err:     "line-299",
		},
		"names a program that is not there": {
			command: host.Command{Path: missing}, err: "starting nvidia-smi: fork/exec " + missing + ": no such file or directory",
		},
		"returns when a daemon's parent ends, dropping its output": {command: daemon("echo out; sleep 60 &")},
		"names what a daemon's parent said":                        {command: daemon("echo 'no devices' >&2; exit 1"), err: "running sh: exit status 1: no devices"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			stdout, err := host.Exec{}.Run(t.Context(), tc.command)
			g.Expect(stdout).To(Equal(tc.stdout))
			if tc.err == "" {
				g.Expect(err).NotTo(HaveOccurred())
				return
			}
			g.Expect(err).To(MatchError(ContainSubstring(tc.err)))
			g.Expect(len(err.Error())).To(BeNumerically("<", 700))
		})
	}
}

func TestExecKillsAllThatAProgramStarted(t *testing.T) {
	g := NewWithT(t)
	pidFile := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := host.Exec{}.Run(ctx, script("sleep 60 & echo $! >"+pidFile+"; wait"))
		done <- err
	}()
	var child int
	g.Eventually(func() (err error) { child, err = readPID(pidFile); return err }).Should(Succeed())
	cancel()
	g.Eventually(done, 2*time.Second).Should(Receive(MatchError(context.Canceled)))
	g.Eventually(func() bool { return alive(child) }).Should(BeFalse(), "the child of the program is dead too")
}

func readPID(file string) (int, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(data)))
}

// alive reports whether a process runs; a zombie does not.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func withStdin(c host.Command, stdin string) host.Command {
	c.Stdin = stdin
	return c
}

func daemon(text string) host.Command {
	c := script(text)
	c.Daemon = true
	return c
}

func TestAProgramSeesTheRootThatItIsGiven(t *testing.T) {
	g := NewWithT(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root, for chroot")
	}
	root := t.TempDir()
	_, err := host.Exec{}.Run(t.Context(), host.Command{Root: root, Path: "/bin/sh", Args: []string{"-c", "true"}})
	g.Expect(err).To(MatchError(ContainSubstring("no such file or directory")), "the shell is not in that root")
	stdout, err := host.Exec{}.Run(t.Context(), host.Command{Root: "/", Path: "/bin/sh", Args: []string{"-c", "cd /; pwd"}})
	g.Expect(stdout, err).To(Equal("/\n"))
}

// TestAProgramThatWritesWithoutEnd: NVIDIA's program passes on what answers in a pipe directory, which may be a tenant's.
func TestAProgramThatWritesWithoutEnd(t *testing.T) {
	g := NewWithT(t)
	stdout, err := host.Exec{}.Run(t.Context(), host.Command{Path: "/usr/bin/yes", Env: []string{"PATH=/usr/bin"}})
	g.Expect(err).To(HaveOccurred())
	g.Expect(len(stdout)).To(BeNumerically("<=", 4<<20))
}
