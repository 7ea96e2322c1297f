// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// While the driver's container restarts, no program can tell a daemon to quit, and the daemon keeps the old driver.
func TestTheMPSHostEndsADaemonWithoutTheDriversPrograms(t *testing.T) {
	g := gomega.NewWithT(t)
	driver, mpsRoot := newDriver(t, sim.A100), filepath.Join(t.TempDir(), "mps")
	want := filepath.Join(mpsRoot, "gpusharing", "nvidia.com_gpu.json")
	g.Expect(os.MkdirAll(filepath.Dir(want), 0o755)).To(gomega.Succeed())
	g.Expect(os.WriteFile(want, []byte(`{"Resource": "nvidia.com/gpu", "ActiveThreadPercentage": 25}`), 0o600)).To(gomega.Succeed())
	start(t, "mps-host", "--driver-root="+driver, "--mps-root="+mpsRoot)
	daemon := filepath.Join(mpsRoot, "nvidia.com", "gpu")
	started, record := filepath.Join(daemon, ".started"), filepath.Join(daemon, ".gpusharing.json")
	g.Eventually(started, "30s", "100ms").Should(gomega.BeAnExistingFile())
	g.Expect(processesWith(t, filepath.Join(daemon, "pipe"))).NotTo(gomega.BeEmpty())

	g.Expect(os.Rename(filepath.Join(driver, "usr"), filepath.Join(driver, "away"))).To(gomega.Succeed())
	g.Expect(os.Remove(want)).To(gomega.Succeed())
	g.Eventually(func() []int { return processesWith(t, filepath.Join(daemon, "pipe")) }, "30s", "100ms").Should(gomega.BeEmpty())
	g.Eventually(record, "30s", "100ms").ShouldNot(gomega.BeAnExistingFile())
}

// NVIDIA's validator removes its mark whenever its own pod is deleted or starts: while the GPU Operator is updated, or
// an agent makes it look at new MIG instances. NVIDIA's device plugin serves on meanwhile, so that pods can start.
func TestADaemonStaysWhileOnlyTheValidatorStartsAgain(t *testing.T) {
	g := gomega.NewWithT(t)
	onNode := newDriver(t, sim.A100)
	validations, mpsRoot := filepath.Join(onNode, "run", "nvidia", "validations"), filepath.Join(t.TempDir(), "mps")
	want := filepath.Join(mpsRoot, "gpusharing", "nvidia.com_gpu.json")
	for _, folder := range []string{validations, filepath.Dir(want)} {
		g.Expect(os.MkdirAll(folder, 0o755)).To(gomega.Succeed())
	}
	for file, content := range map[string]string{
		want: `{"Resource": "nvidia.com/gpu", "ActiveThreadPercentage": 25}`,
		filepath.Join(validations, "driver-ready"):      "NVIDIA_DRIVER_ROOT=/\nNVIDIA_DEV_ROOT=/\n",
		filepath.Join(validations, ".driver-ctr-ready"): "GDS_ENABLED: false\n",
	} {
		g.Expect(os.WriteFile(file, []byte(content), 0o600)).To(gomega.Succeed())
	}
	start(t, "mps-host", "--host-root="+onNode, "--mps-root="+mpsRoot)
	pipe := filepath.Join(mpsRoot, "nvidia.com", "gpu", "pipe")
	started := filepath.Join(mpsRoot, "nvidia.com", "gpu", ".started")
	t.Cleanup(func() {
		for _, pid := range processesWith(t, pipe) {
			_ = syscall.Kill(pid, syscall.SIGKILL) // gone already
		}
	})
	g.Eventually(started, "30s", "100ms").Should(gomega.BeAnExistingFile())

	g.Expect(os.Remove(filepath.Join(validations, "driver-ready"))).To(gomega.Succeed())
	g.Consistently(started, "8s", "100ms").Should(gomega.BeAnExistingFile(), "the driver's container is ready")

	g.Expect(os.Remove(filepath.Join(validations, ".driver-ctr-ready"))).To(gomega.Succeed())
	g.Eventually(started, "30s", "100ms").ShouldNot(gomega.BeAnExistingFile(), "the driver is replaced")
	g.Eventually(func() []int { return processesWith(t, pipe) }, "30s", "100ms").Should(gomega.BeEmpty())
}

// inOwnMounts is the variable that says that this test program runs in a mount namespace of its own.
const inOwnMounts = "TEST_IN_OWN_MOUNTS"

// withOwnMounts runs a test in a process of its own, which sees no other processes and whose mounts and host name no
// other process sees.
func withOwnMounts(t *testing.T, test func(g *gomega.WithT)) {
	t.Helper()
	g := gomega.NewWithT(t)
	if os.Getenv(inOwnMounts) != "" {
		g.Expect(unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")).To(gomega.Succeed())
		g.Expect(unix.Mount("proc", "/proc", "proc", 0, "")).To(gomega.Succeed())
		test(g)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+strings.ReplaceAll(t.Name(), "/", "$/^")+"$", "-test.v")
	c.Env = append(os.Environ(), inOwnMounts+"=yes")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS}
	out, err := c.CombinedOutput()
	g.Expect(err).NotTo(gomega.HaveOccurred(), "%s", out)
	g.Expect(string(out)).To(gomega.ContainSubstring("--- PASS: " + t.Name()))
}

func TestSharedMemoryThatAnotherProgramReplacedIsNoticed(t *testing.T) {
	withOwnMounts(t, func(g *gomega.WithT) {
		f := &hostFlags{hostRoot: "/nowhere", containerRoot: "/", mpsRoot: filepath.Join(t.TempDir(), "mps")}
		g.Expect(runMPSPrepare([]string{"--mps-root=" + f.mpsRoot})).To(gomega.Succeed())
		g.Expect(unix.Mount(f.sharedMemory(), "/dev/shm", "", unix.MS_BIND, "")).To(gomega.Succeed()) // as the MPS pod has it
		g.Expect(f.sharesMemory()).To(gomega.BeTrue())
		// NVIDIA's mount-shm
		g.Expect(unix.Unmount(f.sharedMemory(), 0)).To(gomega.Succeed())
		g.Expect(f.sharesMemory()).To(gomega.BeFalse())
		g.Expect(unix.Mount("shm", f.sharedMemory(), "tmpfs", 0, "")).To(gomega.Succeed())
		g.Expect(f.sharesMemory()).To(gomega.BeFalse())
		g.Expect((&hostFlags{mpsRoot: f.mpsRoot}).sharesMemory()).To(gomega.BeTrue(), "outside of a container")
		g.Expect(unix.Unmount(f.sharedMemory(), 0)).To(gomega.Succeed())
	})
}

// NVIDIA's mount-shm unmounts, and mounts then. A container that starts in between has neither.
func TestAnMPSHostThatStartsWithOtherSharedMemoryThanTheNodesEnds(t *testing.T) {
	withOwnMounts(t, func(g *gomega.WithT) {
		mpsRoot := filepath.Join(t.TempDir(), "mps")
		g.Expect(run(t.Context(), []string{"mps-prepare", "--mps-root=" + mpsRoot})).To(gomega.Succeed())
		err := run(t.Context(), []string{"mps-host", "--mps-root=" + mpsRoot, "--container-root=/", "--driver-root=" + mpsRoot})
		g.Expect(err).To(gomega.MatchError(gomega.ContainSubstring("replaced the shared memory of MPS")))
		g.Expect(unix.Unmount(filepath.Join(mpsRoot, "shm"), 0)).To(gomega.Succeed())
	})
}

// The MPS pod sees the MPS root of the node through a mount of its own, whose mounts are passed on in both directions.
func TestTheMPSPodMountsSharedMemoryOnTheNodeAndLeavesTheirsToClients(t *testing.T) {
	withOwnMounts(t, func(g *gomega.WithT) {
		node, pod, client := filepath.Join(t.TempDir(), "node"), filepath.Join(t.TempDir(), "pod"), filepath.Join(t.TempDir(), "client")
		for _, folder := range []string{node, pod, client} {
			g.Expect(os.MkdirAll(folder, 0o755)).To(gomega.Succeed())
		}
		g.Expect(unix.Mount("run", node, "tmpfs", 0, "")).To(gomega.Succeed())
		g.Expect(unix.Mount("", node, "", unix.MS_SHARED, "")).To(gomega.Succeed())
		g.Expect(unix.Mount(node, pod, "", unix.MS_BIND|unix.MS_REC, "")).To(gomega.Succeed()) // Bidirectional
		onNode := filepath.Join(node, "shm")

		g.Expect(run(t.Context(), []string{"mps-prepare", "--mps-root=" + pod})).To(gomega.Succeed())
		g.Expect(mounted(g, onNode)).To(gomega.BeTrue())
		g.Expect(unix.Mount(onNode, client, "", unix.MS_BIND, "")).To(gomega.Succeed()) // as /dev/shm of a container
		g.Expect(unix.Mount("", client, "", unix.MS_PRIVATE, "")).To(gomega.Succeed())
		segment := filepath.Join(client, "cuda.mps")
		g.Expect(os.WriteFile(segment, []byte("in use"), 0o600)).To(gomega.Succeed())

		ctx, stop := context.WithCancel(t.Context())
		stop()
		g.Expect(run(ctx, []string{"mps-host", "--mps-root=" + pod, "--driver-root=" + pod})).To(gomega.Succeed())
		g.Expect(mounted(g, onNode)).To(gomega.BeFalse())
		g.Expect(os.ReadFile(segment)).To(gomega.BeEquivalentTo("in use"), "a client keeps what it has mounted")

		g.Expect(unix.Mount("shm", onNode, "tmpfs", 0, "")).To(gomega.Succeed()) // NVIDIA's
		g.Expect(os.WriteFile(filepath.Join(onNode, "cuda.mps"), []byte("of NVIDIA's"), 0o600)).To(gomega.Succeed())
		g.Expect(run(t.Context(), []string{"mps-prepare", "--mps-root=" + pod})).To(gomega.Succeed())
		g.Expect(run(ctx, []string{"mps-host", "--mps-root=" + pod, "--driver-root=" + pod})).To(gomega.Succeed())
		g.Expect(os.ReadFile(filepath.Join(onNode, "cuda.mps"))).To(gomega.BeEquivalentTo("of NVIDIA's"), "it is used, and left")
		for _, folder := range []string{client, onNode, pod, node} {
			g.Expect(unix.Unmount(folder, unix.MNT_DETACH)).To(gomega.Succeed())
		}
	})
}

// mounted reports whether a file system is mounted on a folder.
func mounted(g *gomega.WithT, folder string) bool {
	mounts, err := os.ReadFile("/proc/self/mounts")
	g.Expect(err).NotTo(gomega.HaveOccurred())
	return strings.Contains(string(mounts), " "+folder+" ")
}

func TestTheMPSHostGivesTheSharedMemoryBackIfNobodyUsesMPS(t *testing.T) {
	withOwnMounts(t, func(g *gomega.WithT) {
		mpsRoot := filepath.Join(t.TempDir(), "mps")
		shm := filepath.Join(mpsRoot, "shm")
		want := filepath.Join(mpsRoot, "gpusharing", "nvidia.com_gpu.json")
		hosts := func() {
			g.Expect(run(t.Context(), []string{"mps-prepare", "--mps-root=" + mpsRoot})).To(gomega.Succeed())
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- run(ctx, []string{"mps-host", "--mps-root=" + mpsRoot, "--driver-root=" + mpsRoot}) }()
			g.Consistently(done, "1s").ShouldNot(gomega.Receive())
			stop()
			g.Eventually(done, "30s").Should(gomega.Receive(gomega.Succeed()))
		}
		g.Expect(os.MkdirAll(filepath.Dir(want), 0o755)).To(gomega.Succeed())
		g.Expect(os.WriteFile(want, []byte(`{"Resource": "nvidia.com/gpu", "ActiveThreadPercentage": 25}`), 0o600)).To(gomega.Succeed())
		hosts()
		g.Expect(mounted(g, shm)).To(gomega.BeTrue(), "pods go on to have it when the MPS pod starts again")

		record := filepath.Join(mpsRoot, "nvidia.com", "gpu", ".gpusharing.json")
		g.Expect(os.Remove(want)).To(gomega.Succeed())
		g.Expect(os.RemoveAll(record)).To(gomega.Succeed())
		hosts()
		g.Expect(mounted(g, shm)).To(gomega.BeFalse())
	})
}

// A pod that is deleted by force is gone from the API server before it has ended, so that its successor starts beside
// it.
func TestAnMPSPodThatEndsAfterItsSuccessorStartedLeavesTheSharedMemory(t *testing.T) {
	withOwnMounts(t, func(g *gomega.WithT) {
		mpsRoot := filepath.Join(t.TempDir(), "mps")
		shm := filepath.Join(mpsRoot, "shm")
		prepare := func(pod string) {
			g.Expect(unix.Sethostname([]byte(pod))).To(gomega.Succeed())
			g.Expect(run(t.Context(), []string{"mps-prepare", "--mps-root=" + mpsRoot})).To(gomega.Succeed())
		}
		end := func(pod string) {
			g.Expect(unix.Sethostname([]byte(pod))).To(gomega.Succeed())
			ctx, stop := context.WithCancel(t.Context())
			stop()
			g.Expect(run(ctx, []string{"mps-host", "--mps-root=" + mpsRoot, "--driver-root=" + mpsRoot})).To(gomega.Succeed())
		}
		prepare("gpu-sharing-mps-first")
		prepare("gpu-sharing-mps-second")
		end("gpu-sharing-mps-first")
		g.Expect(mounted(g, shm)).To(gomega.BeTrue(), "the second pod uses it")
		end("gpu-sharing-mps-second")
		g.Expect(mounted(g, shm)).To(gomega.BeFalse())
		g.Expect(os.ReadDir(mpsRoot)).To(gomega.ConsistOf(gomega.HaveField("Name()", "shm")), "and nothing else is left")
	})
}

// Clients write to the shared memory and, as root, to the pipe directories while the first container of the MPS pod,
// which has the host's PIDs, labels files: a link in the place of a folder leads to any file of the node, as
// /proc/1/root does.
func TestWhatClientsDoToTheirFilesMakesNoOtherFileTheirs(t *testing.T) {
	for name, writable := range map[string]string{"shared memory": "shm", "pipe directory": "nvidia.com/gpu/pipe"} {
		t.Run(name, func(t *testing.T) {
			withOwnMounts(t, func(g *gomega.WithT) {
				const label = "security.selinux"
				g.Expect(unix.Mount("sysfs", "/sys/fs", "tmpfs", 0, "")).To(gomega.Succeed())
				g.Expect(os.Mkdir("/sys/fs/selinux", 0o755)).To(gomega.Succeed())
				mpsRoot, node := filepath.Join(t.TempDir(), "mps"), t.TempDir()
				passwords := filepath.Join(node, "passwords")
				g.Expect(os.WriteFile(passwords, nil, 0o600)).To(gomega.Succeed())
				if err := unix.Lsetxattr(passwords, label, []byte("of the node"), 0); err != nil {
					t.Skipf("the file system of %s has no labels: %v", node, err)
				}
				prepare := func() error { return run(t.Context(), []string{"mps-prepare", "--mps-root=" + mpsRoot}) }
				g.Expect(prepare()).To(gomega.Succeed())
				mine := filepath.Join(mpsRoot, writable)
				folder, link := filepath.Join(mine, "folder"), filepath.Join(mine, "link")
				g.Expect(os.MkdirAll(folder, 0o755)).To(gomega.Succeed())
				g.Expect(os.Symlink(node, link)).To(gomega.Succeed())
				ctx, stop := context.WithCancel(t.Context())
				stopped := make(chan struct{})
				go func() {
					defer close(stopped)
					for ctx.Err() == nil {
						_ = unix.Renameat2(unix.AT_FDCWD, folder, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE)
						_ = os.WriteFile(filepath.Join(mine, "passing"), nil, 0o600)
						_ = os.Remove(filepath.Join(mine, "passing"))
					}
				}()
				defer func() { stop(); <-stopped; _ = unix.Unmount(filepath.Join(mpsRoot, "shm"), unix.MNT_DETACH) }()
				var failed []error
				for range 300 {
					if err := prepare(); err != nil {
						failed = append(failed, err)
					}
				}
				got := make([]byte, 64)
				n, err := unix.Lgetxattr(passwords, label, got)
				g.Expect(string(got[:n]), err).To(gomega.Equal("of the node"))
				g.Expect(failed).To(gomega.BeEmpty(), "files may go meanwhile")
			})
		})
	}
}

// processesWith finds the processes of the daemon at a pipe directory.
func processesWith(t *testing.T, pipe string) []int {
	t.Helper()
	root, err := os.OpenRoot("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close() //nolint:errcheck // only read
	given, err := host.NewProc(root).WithVariable("CUDA_MPS_PIPE_DIRECTORY")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for pid, value := range given {
		if value == pipe {
			pids = append(pids, pid)
		}
	}
	return pids
}
