// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// tenant starts a shell that has a folder mounted at /mnt, as a client's container has its pipe directory, and has run a
// script when this returns. It needs root.
func tenant(t *testing.T, folder, script string) (pid int) {
	t.Helper()
	command := exec.Command("unshare", "--mount", "sh", "-c", `mount --bind "$0" /mnt && `+script+` && echo mounted && read -r line`, folder)
	in, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = in.Close(); _ = command.Wait() })
	if said := make([]byte, 8); !mounts(out, said) {
		t.Skip("a mount namespace of its own needs root")
	}
	return command.Process.Pid
}

func procOfThisMachine(t *testing.T) *host.Proc {
	t.Helper()
	root, err := os.OpenRoot("/proc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	return host.NewProc(root)
}

// nodesRun is a /run of a node, of that size, with a pipe directory.
func nodesRun(t *testing.T, size string) (run, pipe string) {
	t.Helper()
	run = t.TempDir()
	if err := unix.Mount("run", run, "tmpfs", 0, "size="+size+",mode=755"); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(run, unix.MNT_DETACH) })
	pipe = filepath.Join(run, "pipe")
	NewWithT(t).Expect(os.Mkdir(pipe, 0o755)).To(Succeed())
	return run, pipe
}

// TestTrimGivesBackWhatATenantHasFilled: NVIDIA's device plugin mounts the pipe directory, which lies on the node's
// /run, writable in the containers of clients, most of which run as root.
func TestTrimGivesBackWhatATenantHasFilled(t *testing.T) {
	g := NewWithT(t)
	run, pipe := nodesRun(t, "8m")
	l, err := net.Listen("unix", filepath.Join(pipe, "control"))
	g.Expect(err).NotTo(HaveOccurred())
	defer l.Close() //nolint:errcheck // nothing was sent
	g.Expect(os.WriteFile(filepath.Join(pipe, "control.pid"), []byte("42\n"), 0o600)).To(Succeed())
	g.Expect(os.WriteFile(filepath.Join(run, "of-the-node"), []byte("kept"), 0o600)).To(Succeed())

	tenant(t, pipe, `exec 3>/mnt/removed && head -c 2M /dev/zero >&3 && rm /mnt/removed && mkdir -p /mnt/a/b && head -c 2M /dev/zero >/mnt/a/b/c &&
		ln -s ../of-the-node /mnt/link && exec 4>/mnt/open && (head -c 9M /dev/zero >&4; true)`)
	g.Expect(os.WriteFile(filepath.Join(run, "new"), make([]byte, 1<<20), 0o600)).NotTo(Succeed(), "it is full")
	proc := procOfThisMachine(t)
	held, err := proc.Trim(pipe, 1<<20, 512, true)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(held).To(BeNumerically(">", 6<<20))
	g.Expect(os.WriteFile(filepath.Join(run, "new"), make([]byte, 7<<20), 0o600)).To(Succeed(), "the node has its memory back")
	g.Expect(os.ReadFile(filepath.Join(run, "of-the-node"))).To(BeEquivalentTo("kept"))
	g.Expect(filepath.Join(pipe, "control")).To(BeAnExistingFile(), "the daemon's socket stays")
	g.Expect(filepath.Join(pipe, "control.pid")).To(BeAnExistingFile())

	g.Expect(proc.Trim(pipe, 1<<20, 512, true)).To(BeNumerically("<", 4096))
	for i := range 600 {
		g.Expect(os.WriteFile(filepath.Join(pipe, fmt.Sprintf("entry-%d", i)), nil, 0o600)).To(Succeed())
	}
	_, err = proc.Trim(pipe, 1<<20, 512, true)
	g.Expect(err).NotTo(HaveOccurred())
	left, err := os.ReadDir(pipe)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(left).To(HaveLen(1), "of too many entries only sockets stay")
	g.Expect(proc.Trim(filepath.Join(run, "none"), 1, 1, true)).To(BeZero())
}

// TestTrimEmptiesFoldersHoweverDeep: to go into each of them would take a descriptor, and a piece of the stack, for each.
func TestTrimEmptiesFoldersHoweverDeep(t *testing.T) {
	g := NewWithT(t)
	pipe := t.TempDir()
	root, err := os.OpenRoot(pipe)
	g.Expect(err).NotTo(HaveOccurred())
	defer root.Close() //nolint:errcheck // nothing was written
	at, err := os.Open(pipe)
	g.Expect(err).NotTo(HaveOccurred())
	for range 3000 {
		g.Expect(unix.Mkdirat(int(at.Fd()), "d", 0o755)).To(Succeed())
		below, err := unix.Openat(int(at.Fd()), "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(at.Close()).To(Succeed())
		at = os.NewFile(uintptr(below), "d")
	}
	g.Expect(at.Close()).To(Succeed())
	g.Expect(os.WriteFile(filepath.Join(pipe, "large"), make([]byte, 2<<20), 0o600)).To(Succeed())
	limited(t, 1024)
	_, err = procOfThisMachine(t).Trim(pipe, 1<<20, 512, false)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(os.ReadDir(pipe)).To(BeEmpty())
}

// limited lets this process have no more than so many descriptors, until the test ends.
func limited(t *testing.T, descriptors uint64) {
	t.Helper()
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: min(was.Cur, descriptors), Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &was) })
}

func TestClearLeavesNothingAndFollowsNoLink(t *testing.T) {
	g := NewWithT(t)
	run := t.TempDir()
	pipe := filepath.Join(run, "pipe")
	g.Expect(os.MkdirAll(filepath.Join(pipe, "a", "b"), 0o755)).To(Succeed())
	g.Expect(os.WriteFile(filepath.Join(run, "of-the-node"), []byte("kept"), 0o600)).To(Succeed())
	g.Expect(os.Symlink("../of-the-node", filepath.Join(pipe, "control.pid"))).To(Succeed())
	g.Expect(os.Symlink("../..", filepath.Join(pipe, "a", "up"))).To(Succeed())
	g.Expect(unix.Mkfifo(filepath.Join(pipe, "log"), 0o666)).To(Succeed())
	l, err := net.Listen("unix", filepath.Join(pipe, "control"))
	g.Expect(err).NotTo(HaveOccurred())
	defer l.Close() //nolint:errcheck // nothing was sent
	g.Expect(host.Clear(pipe)).To(Succeed())
	g.Expect(os.ReadDir(pipe)).To(BeEmpty())
	g.Expect(os.ReadFile(filepath.Join(run, "of-the-node"))).To(BeEquivalentTo("kept"))
	g.Expect(host.Clear(filepath.Join(run, "none"))).To(Succeed())
}

const hides, hidesProgram = "HOST_TEST_HIDES", "HOST_TEST_PROGRAM"

func init() {
	if os.Getenv(hides) == "" {
		return
	}
	const size = 6 << 20
	fd, err := unix.Open("/mnt/hidden", unix.O_RDWR|unix.O_CREAT, 0o600)
	if err != nil {
		panic(err)
	}
	if _, err := unix.Write(fd, make([]byte, size)); err != nil {
		panic(err)
	}
	_, err = unix.Mmap(fd, 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err = errors.Join(err, unix.Unlink("/mnt/hidden"), unix.Close(fd)); err != nil {
		panic(err)
	}
	fmt.Println("mounted")
	_, _ = os.Stdin.Read(make([]byte, 1))
	os.Exit(0)
}

// TestTrimFindsWhatATenantHides: the pipe directory lies on the node's /run, which must not be full.
func TestTrimFindsWhatATenantHides(t *testing.T) {
	t.Setenv(hidesProgram, os.Args[0])
	for name, script := range map[string]string{
		"by memory beyond the end of a file":                 `true >/mnt/empty && fallocate --keep-size --length 6M /mnt/empty`,
		"by memory beyond the end of a file that is removed": `exec 9>/mnt/removed && rm /mnt/removed && fallocate --keep-size --length 6M /proc/self/fd/9`,
		"by a file that is removed and only mapped":          hides + `=1 exec "$` + hidesProgram + `"`,
		"behind many files that are removed and small": `
			for i in $(seq 1 300); do head -c 1 /dev/zero >/mnt/small-$i; done &&
			exec bash -c 'for i in $(seq 10 300); do eval "exec $i</mnt/small-$i"; done; rm /mnt/small-*; exec 301>/mnt/large; rm /mnt/large; head -c 6M /dev/zero >&301; echo mounted; read -r line' && true`,
		"behind a hole that adds up to less than nothing": `truncate --size 9223372036854767616 /mnt/hole && head -c 6M /dev/zero >/mnt/large`,
		"behind a removed hole that does": `
			truncate --size 9223372036854767616 /mnt/hole && exec 9</mnt/hole && rm /mnt/hole && head -c 6M /dev/zero >/mnt/large`,
		"in a mount namespace of its own": `
			(exec 9>/mnt/removed && rm /mnt/removed && head -c 6M /dev/zero >&9 && exec unshare --mount sh -c 'echo mounted; read -r line')`,
		"behind many files that are removed and empty": `
			for i in $(seq 3 9); do eval "exec $i>/mnt/small-$i"; done && rm /mnt/small-* &&
			exec bash -c 'for i in $(seq 10 300); do eval "exec $i>/mnt/small-$i"; done; rm /mnt/small-*; exec 301>/mnt/large; rm /mnt/large; head -c 6M /dev/zero >&301; echo mounted; read -r line' && true`,
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			run, pipe := nodesRun(t, "8m")
			free := func() int64 {
				var s unix.Statfs_t
				g.Expect(unix.Statfs(run, &s)).To(Succeed())
				return int64(s.Bfree) * s.Bsize
			}
			tenant(t, pipe, script)
			g.Expect(free()).To(BeNumerically("<", 3<<20), "it is filled")
			proc := procOfThisMachine(t)
			for range 3 {
				held, err := proc.Trim(pipe, 1<<20, 512, true)
				t.Logf("it held %d bytes, %d are free: %v", held, free(), err)
			}
			g.Expect(free()).To(BeNumerically(">", 6<<20))
		})
	}
}

const leases = "HOST_TEST_LEASES"

func init() {
	if folder := os.Getenv(leases); folder != "" {
		lease(folder)
	}
}

// lease removes files of 2 MiB that it has open, and of which it has a lease (fcntl(2)), as who owns a file may take
// without any capability: who opens it for writing waits until the lease is given back, or for 45 s. It gives each back
// when it is asked to, and takes it anew at once.
func lease(folder string) {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGIO)
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil {
		err = unix.Mount(folder, "/mnt", "", unix.MS_BIND, "")
	}
	if err != nil {
		panic(err)
	}
	var leased []uintptr
	for i := range 3 {
		name := fmt.Sprint("/mnt/leased-", i)
		if err := os.WriteFile(name, make([]byte, 2<<20), 0o600); err != nil {
			panic(err)
		}
		fd, err := unix.Open(name, unix.O_RDONLY, 0)
		if err != nil {
			panic(err)
		}
		if err := os.Remove(name); err != nil {
			panic(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_RDLCK); err != nil {
			panic(err)
		}
		leased = append(leased, uintptr(fd))
	}
	fmt.Println("mounted")
	for range asked {
		for _, fd := range leased {
			_, _ = unix.FcntlInt(fd, unix.F_SETLEASE, unix.F_UNLCK)
			_, _ = unix.FcntlInt(fd, unix.F_SETLEASE, unix.F_RDLCK)
		}
	}
}

func TestTrimWaitsForNoLease(t *testing.T) {
	g := NewWithT(t)
	run, pipe := nodesRun(t, "16m")
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), leases+"="+pipe)
	command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	out, err := command.StdoutPipe()
	g.Expect(err).NotTo(HaveOccurred())
	if err := command.Start(); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
	g.Expect(mounts(out, make([]byte, 8))).To(BeTrue())
	proc, done, began := procOfThisMachine(t), make(chan int64, 1), time.Now()
	go func() {
		held, _ := proc.Trim(pipe, 1<<20, 512, true)
		done <- held
	}()
	defer func() { t.Logf("it took %s", time.Since(began)) }()
	g.Eventually(done).WithTimeout(10 * time.Second).Should(Receive(BeNumerically(">=", 6<<20)))
	g.Eventually(func() uint64 {
		_, _ = proc.Trim(pipe, 1<<20, 512, true)
		var s unix.Statfs_t
		g.Expect(unix.Statfs(run, &s)).To(Succeed())
		return s.Bfree * uint64(s.Bsize)
	}).WithTimeout(10*time.Second).Should(BeNumerically(">", 15<<20), "it is given back")
}
