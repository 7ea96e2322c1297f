// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver/cuda"
)

// LimitSet is the call in the log of calls under which each limit stands that was set, with the cgroup and the bytes.
const LimitSet = "limit"

// ServePrograms does for CUDA programs what the kernel module does, until the context ends: it gives them contexts and
// memory, and charges that to the cgroup in which the kernel says they are. A program is who the kernel says it is.
// Hierarchy is that of the cgroups, by the name in /proc/<pid>/cgroup: empty for cgroup v2.
func (d *Driver) ServePrograms(ctx context.Context, hierarchy string) error {
	path := filepath.Join(d.root, stateFolder, cuda.Socket)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return err
	}
	if err := os.Chmod(path, 0o777); err != nil { // programs of any user
		return errors.Join(err, listener.Close())
	}
	go func() {
		<-ctx.Done()
		_ = listener.Close() // and so ends the loop
	}()
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go d.serveProgram(c, hierarchy)
		}
	}()
	return nil
}

// serveProgram answers one program until it ends.
func (d *Driver) serveProgram(c net.Conn, hierarchy string) {
	defer c.Close() //nolint:errcheck // the program has ended
	p := program{Driver: d}
	pid, err := peer(c)
	if err == nil {
		p.pid = pid
		p.cgroup, err = cgroupOf(pid, hierarchy)
	}
	defer func() { _ = d.RemoveProcess(p.pid) }() // of a driver that is gone
	for lines := bufio.NewScanner(c); lines.Scan(); {
		answer := "CUDA_ERROR_UNKNOWN"
		if err == nil {
			answer = p.answer(strings.Fields(lines.Text()))
		}
		if _, err := fmt.Fprintln(c, answer); err != nil {
			return
		}
	}
}

// program is a CUDA program, with the GPU of its context.
type program struct {
	*Driver

	pid          int
	cgroup, uuid string
}

func (p *program) answer(asked []string) string {
	answer := ""
	err := p.Update(func(s *State) (err error) {
		number := func(i int) (n uint64) {
			if i < len(asked) {
				n, _ = strconv.ParseUint(asked[i], 10, 64) // 0: refused
			}
			return n
		}
		switch asked[0] {
		case "context":
			i := int(number(1))
			if i >= len(s.Node.GPUs) {
				return errors.New("CUDA_ERROR_NO_DEVICE")
			}
			p.uuid = s.Node.GPUs[i].UUID
			in := filepath.Join(s.Node.Cgroups.Root, p.cgroup)
			return s.Node.StartProgram(p.uuid, gpu.Process{PID: p.pid, Name: "workload", Instance: gpu.WholeGPU}, in)
		case "allocate":
			kind := sim.DeviceMemory
			if asked[len(asked)-1] == "true" {
				kind = sim.ManagedMemory
			}
			return s.Node.Allocate(p.uuid, p.pid, kind, number(1))
		case "total":
			seen, err := s.Node.MemoryFor(p.uuid, p.pid)
			if err == nil {
				answer = strconv.FormatInt(seen.Total, 10)
			}
			return err
		}
		return errors.New("CUDA_ERROR_NOT_SUPPORTED")
	})
	if err != nil {
		return err.Error()
	}
	return "OK" + answer
}

// peer is the process at the other end of a connection, by its number in our PID namespace.
func peer(c net.Conn) (int, error) {
	u, is := c.(*net.UnixConn)
	if !is {
		return 0, errors.New("no unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0, err
	}
	var who *unix.Ucred
	var asked error
	err = raw.Control(func(fd uintptr) { who, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(err, asked); err != nil {
		return 0, err
	}
	return int(who.Pid), nil
}

// cgroupOf is the path, in a hierarchy, of the cgroup of a process.
func cgroupOf(pid int, hierarchy string) (string, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	for line := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\n") {
		const fields = 3
		if f := strings.SplitN(line, ":", fields); len(f) == fields && f[1] == hierarchy {
			return f[2], nil
		}
	}
	return "", fmt.Errorf("process %d is in no cgroup of hierarchy %q", pid, hierarchy)
}
