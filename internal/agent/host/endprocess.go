// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
)

// Ender tells how a process was started, and ends processes that cannot be asked to end.
type Ender interface {
	// Arguments are the arguments of a process, its program first; none if the process is gone.
	Arguments(pid int) []string
	// Kill ends a process at once (SIGKILL). A process that is gone is no error.
	Kill(pid int) error
}

// Arguments implements Ender.
func (p *Proc) Arguments(pid int) []string {
	cmdline, err := p.readMemory(strconv.Itoa(pid), "cmdline", maxCommand)
	if err != nil || len(cmdline) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(cmdline), "\x00"), "\x00")
}

// Kill implements Ender. The proc file system must be that of this process's PID namespace.
func (p *Proc) Kill(pid int) error {
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("ending process %d: %w", pid, err)
	}
	return nil
}
