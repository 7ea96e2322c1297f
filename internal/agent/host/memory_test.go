// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// locksItself names the file by which a process of these tests locks its own memory, and startsNever that by which it
// never comes to the program that it starts. Each has pipeFolder mounted at /mnt, and a file of it open that is removed.
const locksItself, startsNever, pipeFolder = "HOST_TEST_LOCKS_ITSELF", "HOST_TEST_STARTS_NEVER", "HOST_TEST_PIPE_FOLDER"

func init() {
	if file := os.Getenv(locksItself); file != "" {
		mountPipe()
		lockMemory(file)
	}
	if file := os.Getenv(startsNever); file != "" {
		mountPipe()
		if _, err := os.Open(file); err != nil { // for this program alone, so the kernel closes it before the next one starts
			panic(err)
		}
		panic(unix.Exec("/proc/self/exe", []string{"next"}, []string{startsNever + "="}))
	}
}

func mountPipe() {
	const removed = "/mnt/removed-by-the-tenant"
	_ = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	err := unix.Mount(os.Getenv(pipeFolder), "/mnt", "", unix.MS_BIND, "")
	if err == nil {
		_, err = unix.Open(removed, unix.O_CREAT|unix.O_RDWR, 0o600) // also for the next program
	}
	if err = errors.Join(err, os.Remove(removed)); err != nil {
		panic(err)
	}
}

// lockMemory lets nobody read the memory of this process any more: one thread reads a page of a file that does not come,
// through /proc/self/mem, which holds the lock of the memory meanwhile; another one waits for the lock to write, and
// all that ask after it wait for that one.
func lockMemory(file string) {
	f, err := os.Open(file)
	if err != nil {
		panic(err)
	}
	page, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	memory, err := os.Open("/proc/self/mem")
	if err != nil {
		panic(err)
	}
	go func() { _, _ = memory.ReadAt(make([]byte, 8), int64(uintptr(unsafe.Pointer(&page[0])))) }()
	for {
		other, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			panic(err)
		}
		_ = unix.Munmap(other)
	}
}

// silentFile is a file of a file system that answers to all but to read it and to close it. Asked tells when it was.
func silentFile(t *testing.T) (file string, asked <-chan bool) {
	t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	if err := unix.Mount("silent", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)); err != nil {
		_ = unix.Close(fd)
		t.Skip(err)
	}
	reads := make(chan bool, 1)
	go answerFuse(fd, reads)
	t.Cleanup(func() {
		_ = unix.Unmount(dir, unix.MNT_FORCE) // all that wait go on
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		_ = unix.Close(fd)
	})
	return filepath.Join(dir, "file"), reads
}

// answerFuse is the server of that file system (linux/fuse.h), until its connection ends.
func answerFuse(fd int, reads chan<- bool) {
	const lookup, getattr, open, read, flush, initialize = 1, 3, 14, 15, 25, 26
	attributes := func(node uint64) []any { // of the folder, which is node 1, or of the file
		mode := uint32(unix.S_IFDIR | 0o755)
		if node != 1 {
			mode = unix.S_IFREG | 0o644
		}
		return []any{node, uint64(4096), [4]uint64{}, [3]uint32{}, mode, [6]uint32{1}}
	}
	for buffer := make([]byte, 1<<17); ; {
		n, err := unix.Read(fd, buffer)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil || n < 40 {
			return
		}
		request := struct {
			Length, Kind uint32
			Unique, Node uint64
		}{}
		_ = binary.Read(bytes.NewReader(buffer), binary.NativeEndian, &request)
		var answer []any
		status := int32(0)
		switch request.Kind {
		case initialize:
			answer = []any{uint32(7), uint32(31), [2]uint32{}, [2]uint16{}, uint32(4096), uint32(1), [2]uint16{}, [8]uint32{}}
		case lookup:
			answer = append([]any{uint64(2), [3]uint64{}, [2]uint32{}}, attributes(2)...)
		case getattr:
			answer = append([]any{[2]uint64{}}, attributes(request.Node)...)
		case open:
			answer = []any{[2]uint64{}}
		case read, flush:
			select {
			case reads <- true:
			default:
			}
			continue
		default:
			status = -int32(unix.ENOSYS)
		}
		var body, whole bytes.Buffer
		for _, field := range answer {
			_ = binary.Write(&body, binary.NativeEndian, field)
		}
		_ = binary.Write(&whole, binary.NativeEndian, struct {
			Length uint32
			Status int32
			Unique uint64
		}{uint32(16 + body.Len()), status, request.Unique})
		_, _ = unix.Write(fd, append(whole.Bytes(), body.Bytes()...))
	}
}

// TestNoProcessKeepsItsObserversWaiting: a tenant may mount an NFS server of their own, and any process can keep the lock
// of its memory by a page of a file there that does not come, and that of who it is by such a file that is closed before
// it starts another program.
func TestNoProcessKeepsItsObserversWaiting(t *testing.T) {
	for _, keeps := range []string{locksItself, startsNever} {
		t.Run(keeps, func(t *testing.T) {
			g := NewWithT(t)
			pipe := t.TempDir()
			tenant(t, pipe, `exec 3>/mnt/other && head -c 2M /dev/zero >&3 && rm /mnt/other`)
			file, asked := silentFile(t)
			command := exec.Command(os.Args[0])
			command.Env = append(os.Environ(), keeps+"="+file, pipeFolder+"="+pipe)
			command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS} // as a container has
			if err := command.Start(); err != nil {
				t.Skip(err)
			}
			t.Cleanup(func() { _ = command.Process.Kill(); go func() { _ = command.Wait() }() })
			g.Eventually(asked).WithTimeout(10 * time.Second).Should(Receive())
			proc, pid := procOfThisMachine(t), command.Process.Pid
			for name, look := range map[string]func(){
				"Describe":     func() { g.Expect(proc.Describe(pid).Name).To(HavePrefix("host")) },
				"Running":      func() { _, _ = proc.Running("config-manager") },
				"Environment":  func() { proc.Environment(pid) },
				"Arguments":    func() { proc.Arguments(pid) },
				"WithVariable": func() { _, _ = proc.WithVariable("CUDA_MPS_PIPE_DIRECTORY") },
				"User":         func() { proc.User(pid) },
				"Mounted":      func() { g.Expect(proc.Mounted(pipe)).To(HaveKeyWithValue(pipe, ContainElement(pid))) },
				"Privileged":   func() { proc.Privileged(pid) },
				"Trim":         func() { _, _ = proc.Trim(pipe, 1<<20, 512, true) },
			} {
				done := make(chan bool)
				go func() {
					for range 20 {
						look()
					}
					close(done)
				}()
				g.Eventually(done).WithTimeout(20*time.Second).Should(BeClosed(), name)
			}
			g.Expect(proc.Trim(pipe, 1<<20, 512, true)).To(BeNumerically("<", 4096), "what others hold is emptied all the same")
		})
	}
}

// TestAProcessIsReadAgainOnceOthersDoNotKeepTheirMemory: at most sixteen are waited for at a time.
func TestAProcessIsReadAgainOnceOthersDoNotKeepTheirMemory(t *testing.T) {
	g := NewWithT(t)
	dir := t.TempDir()
	root := openRoot(t, dir)
	proc, environ := host.NewProc(root), func(pid int) string { return filepath.Join(dir, strconv.Itoa(pid), "environ") }
	g.Expect(os.Mkdir(filepath.Join(dir, "1"), 0o700)).To(Succeed())
	g.Expect(os.WriteFile(environ(1), []byte("A=B\x00"), 0o600)).To(Succeed())
	var waits sync.WaitGroup
	for pid := 2; pid < 2+16; pid++ {
		g.Expect(os.Mkdir(filepath.Join(dir, strconv.Itoa(pid)), 0o700)).To(Succeed())
		g.Expect(unix.Mkfifo(environ(pid), 0o600)).To(Succeed())
		waits.Go(func() { proc.Environment(pid) })
	}
	waits.Wait()
	g.Expect(proc.Environment(1)).To(BeEmpty())
	for pid := 2; pid < 2+16; pid++ {
		f, err := os.OpenFile(environ(pid), os.O_WRONLY, 0)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(f.Close()).To(Succeed())
	}
	g.Eventually(func() map[string]string { return proc.Environment(1) }).Should(Equal(map[string]string{"A": "B"}))
}

// TestProcessesThatAnswerLateAreWaitedForTogether: a tenant may have many.
func TestProcessesThatAnswerLateAreWaitedForTogether(t *testing.T) {
	g := NewWithT(t)
	dir := t.TempDir()
	proc, began := host.NewProc(openRoot(t, dir)), time.Now()
	for pid := 2; pid < 2+14; pid++ {
		g.Expect(os.Mkdir(filepath.Join(dir, strconv.Itoa(pid)), 0o700)).To(Succeed())
		g.Expect(unix.Mkfifo(filepath.Join(dir, strconv.Itoa(pid), "environ"), 0o600)).To(Succeed())
		g.Expect(proc.Environment(pid)).To(BeEmpty())
	}
	g.Expect(time.Since(began)).To(And(BeNumerically(">", 4*time.Second), BeNumerically("<", 9*time.Second)))
}

// TestAProcessHasOneNameForAllWhoAsk at the same time: comm ends after 15 characters.
func TestAProcessHasOneNameForAllWhoAsk(t *testing.T) {
	proc := newProc(t, map[string]string{"7/cmdline": "/opt/nvidia-cuda-mps-server\x00", "7/comm": "nvidia-cuda-mps\n"})
	var asks sync.WaitGroup
	for range 8 {
		asks.Go(func() {
			for range 200 {
				if name := proc.Describe(7).Name; name != "nvidia-cuda-mps-server" {
					t.Error(name)
					return
				}
			}
		})
	}
	asks.Wait()
}
