// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

// Proc reads the proc file system. It implements Processes, Programs and Boot. To see the processes of the whole node
// it must be that of the host's PID namespace.
type Proc struct {
	root    *os.Root
	closing atomic.Int32 // descriptors of other processes that are being closed
	leased  atomic.Int32 // files that are emptied once their leases end
	waiting atomic.Int32 // for processes
	waits   sync.Map     // for which: *looking by name of a file
	patience
}

// NewProc reads the proc file system under root, such as /proc.
func NewProc(root *os.Root) *Proc { return &Proc{root: root} }

// How much is read of a file of a process, in bytes. What a process calls its arguments and its environment may have no
// end: any may name terabytes of its own memory so (PR_SET_MM_MAP of prctl(2)), which costs it nothing.
const (
	maxCommand     = 64 << 10
	maxEnvironment = 1 << 20
	maxStatus      = 1 << 20 // the kernel lists up to 65536 groups before what matters
)

// read reads a file below /proc, no further than that.
func (p *Proc) read(name string, most int64) ([]byte, error) {
	f, err := p.root.Open(name)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the file
	}
	defer f.Close()                            //nolint:errcheck // only read
	return io.ReadAll(io.LimitReader(f, most)) //nolint:wrapcheck // likewise
}

// How long a process in a container is waited for, and how many at a time.
const processTimeout, maxWaiting = time.Second, 16

// How long processes in containers are waited for together: a tenant may have many that answer late. It comes back in half
// a minute. One that is not at fault answers within leastPatience.
const mostPatience, comesBack, leastPatience = 5 * time.Second, 6, 10 * time.Millisecond

// patience is what is left of that.
type patience struct {
	mutex sync.Mutex
	spent time.Duration
	at    time.Time
}

// left is how long one process is waited for now.
func (p *patience) left(now time.Time) time.Duration {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.spent, p.at = max(p.spent-now.Sub(p.at)/comesBack, 0), now
	return max(min(processTimeout, mostPatience-p.spent), leastPatience)
}

func (p *patience) spend(d time.Duration) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.spent += d
}

// errWaits says that the kernel does not tell about a process, because the process keeps a lock.
var errWaits = errors.New("the process does not let itself be looked at")

// looking is a look at a process. What was seen is set once done is closed.
type looking struct {
	until time.Time // it is waited for
	done  chan struct{}
	seen  []byte
	err   error
}

// look looks at something of a process for which the kernel needs a lock that any process can keep, by a file on a file
// system that answers to nobody:
//
//	of its memory (cmdline, environ), by a page of such a file that is on its way to it
//	of who it is (environ, descriptors and links such as ns/user), by such a file that the kernel closes before the process
//	starts another program (exec_update_lock)
//
// The goroutine that waits there is left behind, and the same is not looked at again meanwhile.
func (p *Proc) look(at string, how func() ([]byte, error)) ([]byte, error) {
	began := time.Now() //nolint:forbidigo // as below
	l := &looking{until: began.Add(p.left(began)), done: make(chan struct{})}
	if other, looks := p.waits.LoadOrStore(at, l); looks {
		l = other.(*looking) //nolint:forcetypeassert // nothing else is stored
	} else {
		go p.finish(l, at, how)
	}
	defer func() { p.spend(time.Since(began)) }() //nolint:forbidigo // as below
	select {
	case <-l.done:
		return l.seen, l.err
	case <-time.After(time.Until(l.until)): //nolint:forbidigo // of the machine: the work is the kernel's, and host knows no Kubernetes
		return nil, errWaits
	}
}

// finish ends a look, unless too many are waited for.
func (p *Proc) finish(l *looking, at string, how func() ([]byte, error)) {
	if l.err = errWaits; p.waiting.Add(1) <= maxWaiting {
		l.seen, l.err = how()
	}
	p.waiting.Add(-1)
	p.waits.Delete(at)
	close(l.done)
}

// readMemory reads a file of a process that the kernel takes from the memory of that process. Tenants have no process
// outside of containers, so those that are outside are waited for.
func (p *Proc) readMemory(dir, name string, most int64) ([]byte, error) {
	file := path.Join(dir, name)
	if p.inOwnPIDs(dir) {
		return p.read(file, most)
	}
	return p.look(file, func() ([]byte, error) { return p.read(file, most) })
}

// status is a field of what the kernel says about a process without a lock; empty if it is gone.
func (p *Proc) status(dir, field string) string {
	status, _ := p.read(path.Join(dir, "status"), maxStatus)
	for line := range strings.Lines(string(status)) {
		if value, is := strings.CutPrefix(line, field+":"); is && strings.HasSuffix(line, "\n") { // a line that is cut says something else
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Describe implements Processes.
func (p *Proc) Describe(pid int) Process {
	dir := strconv.Itoa(pid)
	described := Process{Name: printable(p.name(dir)), HostPIDs: p.inOwnPIDs(dir)}
	if cgroups, err := p.read(path.Join(dir, "cgroup"), maxStatus); err == nil {
		described.PodUID, described.ContainerID = parseCgroups(string(cgroups))
	}
	return described
}

// inOwnPIDs reports whether a process is in the PID namespace of this proc file system, which is the host's: the kernel
// lists the PIDs that it has, one in each namespace from that one on.
func (p *Proc) inOwnPIDs(dir string) bool { return len(strings.Fields(p.status(dir, "NSpid"))) == 1 }

// name is the base name of the first argument, or what the kernel calls it: comm ends after 15 characters, too short
// for nvidia-cuda-mps-server.
func (p *Proc) name(dir string) string {
	if program := p.program(dir); program != "" {
		return program
	}
	return p.comm(dir)
}

// comm is what the kernel calls a process: the program that it was started as, unless it has chosen another name.
func (p *Proc) comm(dir string) string {
	comm, err := p.read(path.Join(dir, "comm"), maxStatus)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(comm))
}

// printable is a name as reports and terminals show it: a process may call itself anything. Bytes that are no text would
// be others once the API server has them, and so a change with each report.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, name)
}

// ID implements Boot.
func (p *Proc) ID() (string, error) {
	id, err := p.root.ReadFile("sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

// How the kubelet and the container runtimes name the cgroups of a container:
//
//	cgroupfs  /kubepods/burstable/pod<uid>/<container id>
//	systemd   /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid with _>.slice/cri-containerd-<id>.scope
//	cri-o     …/kubepods-pod<uid with _>.slice/crio-<id>.scope
//
// A nested cgroup may follow, which the container has named as it liked: the pod and the container are the first ones,
// and there is no pod below a unit that is none of the kubelet's. With cgroup v1 there is one line for each controller,
// with v2 one line in all.
var (
	podSegment       = regexp.MustCompile(`^(?:kubepods(?:-besteffort|-burstable)?-)?pod([0-9a-fA-F]{8}[-_][0-9a-fA-F_-]{27}|[0-9a-f]{32})(?:\.slice)?$`)
	containerSegment = regexp.MustCompile(`^(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?$`)
)

// parseCgroups finds the pod and the container in /proc/<pid>/cgroup.
func parseCgroups(cgroups string) (podUID, containerID string) {
	for line := range strings.Lines(cgroups) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		if podUID, containerID = parseCgroup(fields[2]); podUID != "" {
			return podUID, containerID
		}
	}
	return "", ""
}

func parseCgroup(cgroup string) (podUID, containerID string) {
	for segment := range strings.SplitSeq(cgroup, "/") {
		container := containerSegment.FindStringSubmatch(segment)
		switch pod := podSegment.FindStringSubmatch(segment); {
		case podUID != "" && container != nil:
			return podUID, container[1]
		case podUID != "" && segment != "":
			return podUID, ""
		case pod != nil:
			podUID = strings.ReplaceAll(pod[1], "_", "-")
		case container != nil || strings.HasSuffix(segment, ".scope") || strings.HasSuffix(segment, ".service"):
			return "", ""
		}
	}
	return podUID, ""
}

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
