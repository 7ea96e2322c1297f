// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// Programs tells about programs that run somewhere on the node, also in containers.
type Programs interface {
	// Running are the PIDs of the processes that run a program, by what the kernel calls them: up to 15 characters.
	Running(program string) ([]int, error)
	// Environment is the environment with which a process was started; empty if it is gone, or does not let itself be read.
	Environment(pid int) map[string]string
	// Privileged reports whether a process may administer the node (CAP_SYS_ADMIN of the host), as those of privileged
	// containers may. "baseline" of Pod Security denies it to tenants.
	Privileged(pid int) bool
}

// Running implements Programs.
func (p *Proc) Running(program string) ([]int, error) {
	entries, err := fs.ReadDir(p.root.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var pids []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err == nil && p.comm(entry.Name()) == program {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// program is the base name of the first argument of a process; empty for a kernel thread and one that is gone.
func (p *Proc) program(dir string) string {
	cmdline, err := p.readMemory(dir, "cmdline", maxCommand)
	argument, _, _ := strings.Cut(string(cmdline), "\x00")
	if err != nil || argument == "" {
		return ""
	}
	return path.Base(argument)
}

// Environment implements Programs.
func (p *Proc) Environment(pid int) map[string]string {
	found := map[string]string{}
	environ, _ := p.readMemory(strconv.Itoa(pid), "environ", maxEnvironment) // one that is gone has none
	for pair := range strings.SplitSeq(string(environ), "\x00") {
		if name, value, ok := strings.Cut(pair, "="); ok {
			found[name] = value
		}
	}
	return found
}
