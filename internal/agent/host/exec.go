// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// waitDelay is how long a program that was killed, or a child of it that holds its output, is waited for.
	waitDelay = 5 * time.Second
	// maxSaid is how much of what a failed program said its error shows, in bytes.
	maxSaid = 512
	// maxOutput is how much a program may write to stdout, and to stderr, in bytes: some pass on what others say.
	maxOutput = 4 << 20
)

// errOutput ends a program that writes too much.
var errOutput = fmt.Errorf("it wrote more than %d bytes", maxOutput)

// output collects what a program writes, up to maxOutput. It has no other way in than Write.
type output struct{ written bytes.Buffer }

func (o *output) Write(p []byte) (int, error) {
	if o.written.Len()+len(p) > maxOutput {
		return 0, errOutput
	}
	return o.written.Write(p)
}

func (o *output) String() string { return o.written.String() }

// Exec is the Runner of the operating system. Each program runs in a process group of its own.
type Exec struct{}

// Run implements Runner.
func (Exec) Run(ctx context.Context, c Command) (string, error) {
	cmd := exec.CommandContext(ctx, c.Path, c.Args...) //nolint:gosec // running programs is what it is for; there is no shell
	cmd.Env = append([]string{}, c.Env...)             // not nil, which would mean our own environment
	cmd.Stdin = strings.NewReader(c.Stdin)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if c.Root != "" && filepath.Clean(c.Root) != "/" {
		cmd.SysProcAttr.Chroot, cmd.Dir = c.Root, "/"
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = waitDelay
	if c.Daemon {
		return "", runDaemon(ctx, cmd)
	}
	var stdout, stderr output
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), failure(ctx, cmd, err, cmp.Or(strings.TrimSpace(stderr.String()), stdout.String()))
	}
	return stdout.String(), nil
}

// runDaemon collects the output in a file rather than through a pipe: the daemon that stays may keep it open, and a
// pipe whose reader has gone would kill it. The file lies in memory, since a container may have nowhere to write.
func runDaemon(ctx context.Context, cmd *exec.Cmd) error {
	fd, err := unix.MemfdCreate("output", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("collecting the output of %s: %w", filepath.Base(cmd.Path), err)
	}
	output := os.NewFile(uintptr(fd), "output")
	defer output.Close() //nolint:errcheck // nothing of it is needed any more
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Run(); err != nil {
		said, _ := io.ReadAll(io.NewSectionReader(output, 0, math.MaxInt64))
		return failure(ctx, cmd, err, string(said))
	}
	return nil
}

// failure names the program, how it ended and the end of what it said. It wraps the context's error if that was the
// cause.
func failure(ctx context.Context, cmd *exec.Cmd, err error, said string) error {
	program := filepath.Base(cmd.Path)
	said = tail(strings.TrimSpace(said))
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
	if len(said) > maxSaid {
		said = "…" + strings.ToValidUTF8(said[len(said)-maxSaid:], "")
	}
	return ": " + said
}

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
	var pids []int
	err := p.each(func(dir string, pid int) {
		if p.comm(dir) == program {
			pids = append(pids, pid)
		}
	})
	return pids, err
}

// each goes over the processes.
func (p *Proc) each(do func(dir string, pid int)) error {
	entries, err := fs.ReadDir(p.root.FS(), ".")
	if err != nil {
		return fmt.Errorf("listing processes: %w", err)
	}
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			do(entry.Name(), pid)
		}
	}
	return nil
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

// rebootSignal is SIGRTMIN+5, as glibc counts: systemd then starts reboot.target, as `systemctl reboot` does
// (systemd(1), "Signals"). An init that does not know it takes no notice.
const rebootSignal = syscall.Signal(34 + 5)

// initPID is the process that runs the node.
const initPID = 1

// Systemd is the Rebooter of a node that systemd runs. It needs the host's PID namespace and the right to signal root's
// processes, and runs no program of the host.
type Systemd struct {
	root *os.Root
	kill func(pid int, signal syscall.Signal) error
}

// NewSystemd reads the proc file system under root, such as /proc, which must be that of the host's PID namespace.
func NewSystemd(root *os.Root) *Systemd { return &Systemd{root: root, kill: syscall.Kill} }

// Able implements Rebooter.
func (s *Systemd) Able() error {
	comm, err := s.root.ReadFile(fmt.Sprintf("%d/comm", initPID))
	if err != nil {
		return fmt.Errorf("finding out what runs the node: %w", err)
	}
	if name := strings.TrimSpace(string(comm)); name != "systemd" {
		return fmt.Errorf("process 1 is %s, and only systemd is known to reboot a node in order when it is asked to by a signal; "+
			"reboot the node by hand", name)
	}
	return nil
}

// Reboot implements Rebooter.
func (s *Systemd) Reboot() error {
	if err := s.Able(); err != nil {
		return err
	}
	if err := s.kill(initPID, rebootSignal); err != nil {
		return fmt.Errorf("asking systemd to reboot the node: %w", err)
	}
	return nil
}

// NoReboot is the Rebooter of an agent that must not reboot its node. It is the reason, and what to do about it.
type NoReboot string

// Able implements Rebooter.
func (n NoReboot) Able() error { return errors.New(string(n)) }

// Reboot implements Rebooter.
func (n NoReboot) Reboot() error { return n.Able() }
