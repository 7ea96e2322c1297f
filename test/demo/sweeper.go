// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const sweeperCommand = "sweep"

// sweeper is the process that outlives the demo. It holds the reading end of a pipe; when the demo ends, however it
// ends, the pipe closes.
type sweeper struct {
	pipe *os.File
	cmd  *exec.Cmd
}

func startSweeper(dir string) (*sweeper, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("starting the sweeper: %w", err)
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("starting the sweeper: %w", err)
	}
	defer reader.Close() //nolint:errcheck // the sweeper has its own
	cmd := exec.Command(self, sweeperCommand, dir)
	cmd.Stdin = reader
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is not for it
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the sweeper: %w", err)
	}
	return &sweeper{pipe: writer, cmd: cmd}, nil
}

// finish lets the sweeper do its work and waits for it.
func (s *sweeper) finish() {
	_ = s.pipe.Close()
	_ = s.cmd.Wait()
}

// sweep waits for the end of the demo, ends every process that it left, and removes its folder.
func sweep(dir string) {
	signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	_, _ = io.Copy(io.Discard, os.Stdin)
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		for range 50 {
			pids := processesOf(dir)
			if len(pids) == 0 {
				break
			}
			for _, pid := range pids {
				_ = syscall.Kill(pid, s)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	_ = os.RemoveAll(dir)
}

// marker is the environment variable by which the demo's processes are known. MPS daemons, which get an environment of
// their own, are known by their program, which lies in the demo's folder.
const marker = "GPUSHARING_DEMO"

// processesOf finds the processes that the demo of a folder has started, or that these have.
func processesOf(dir string) []int {
	var pids []int
	folders, _ := filepath.Glob("/proc/[0-9]*")
	for _, folder := range folders {
		pid, err := strconv.Atoi(filepath.Base(folder))
		if err != nil || pid == os.Getpid() {
			continue
		}
		environ, _ := os.ReadFile(filepath.Join(folder, "environ"))
		program, _ := os.Readlink(filepath.Join(folder, "exe"))
		if bytes.Contains(environ, []byte(marker+"="+dir+"\x00")) || strings.HasPrefix(program, dir+"/") {
			pids = append(pids, pid)
		}
	}
	return pids
}
