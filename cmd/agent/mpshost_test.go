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

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/host"
)

// While the driver's container restarts, no program can tell a daemon to quit, and the daemon keeps the old driver.
func TestTheMPSHostEndsADaemonWithoutTheDriversPrograms(t *testing.T) {
	g := gomega.NewWithT(t)
	driver, mpsRoot := newDriver(t, sim.A100), filepath.Join(t.TempDir(), "mps")
	wish := filepath.Join(mpsRoot, "gpusharing", "nvidia.com_gpu.json")
	g.Expect(os.MkdirAll(filepath.Dir(wish), 0o755)).To(gomega.Succeed())
	g.Expect(os.WriteFile(wish, []byte(`{"Resource": "nvidia.com/gpu", "ActiveThreadPercentage": 25}`), 0o600)).To(gomega.Succeed())
	start(t, "mps-host", "--driver-root="+driver, "--mps-root="+mpsRoot)
	daemon := filepath.Join(mpsRoot, "nvidia.com", "gpu")
	started, record := filepath.Join(daemon, ".started"), filepath.Join(daemon, ".gpusharing.json")
	g.Eventually(started, "30s", "100ms").Should(gomega.BeAnExistingFile())
	g.Expect(processesWith(t, filepath.Join(daemon, "pipe"))).NotTo(gomega.BeEmpty())

	g.Expect(os.Rename(filepath.Join(driver, "usr"), filepath.Join(driver, "away"))).To(gomega.Succeed())
	g.Expect(os.Remove(wish)).To(gomega.Succeed())
	g.Eventually(func() []int { return processesWith(t, filepath.Join(daemon, "pipe")) }, "30s", "100ms").Should(gomega.BeEmpty())
	g.Eventually(record, "30s", "100ms").ShouldNot(gomega.BeAnExistingFile())
}

// inOwnMounts is the variable that says that this test program runs in a mount namespace of its own.
const inOwnMounts = "TEST_IN_OWN_MOUNTS"

// withOwnMounts runs a test in a process of its own, which sees no other processes and whose mounts no other process sees.
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
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	c.Env = append(os.Environ(), inOwnMounts+"=yes")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	out, err := c.CombinedOutput()
	g.Expect(err).NotTo(gomega.HaveOccurred(), "%s", out)
	g.Expect(string(out)).To(gomega.ContainSubstring("--- PASS: " + t.Name()))
}

func TestSharedMemoryThatAnotherProgramReplacedIsNoticed(t *testing.T) {
	withOwnMounts(t, func(g *gomega.WithT) {
		f := &hostFlags{hostRoot: "/", mpsRoot: filepath.Join(t.TempDir(), "mps")}
		g.Expect(runMPSPrepare([]string{"--mps-root=" + f.mpsRoot})).To(gomega.Succeed())
		g.Expect(unix.Mount(f.sharedMemory(), "/dev/shm", "", unix.MS_BIND, "")).To(gomega.Succeed()) // as the MPS pod has it
		shares := f.sharesMemory()
		g.Expect(shares()).To(gomega.BeTrue())
		// NVIDIA's mount-shm
		g.Expect(unix.Unmount(f.sharedMemory(), 0)).To(gomega.Succeed())
		g.Expect(shares()).To(gomega.BeFalse())
		g.Expect(unix.Mount("shm", f.sharedMemory(), "tmpfs", 0, "")).To(gomega.Succeed())
		g.Expect(shares()).To(gomega.BeFalse())
		again := f.sharesMemory()
		g.Expect(again()).To(gomega.BeTrue(), "where the two differ from the start there is nothing to compare")
		g.Expect(unix.Unmount(f.sharedMemory(), 0)).To(gomega.Succeed())
	})
}

func TestTheMPSHostGivesTheSharedMemoryBackIfNobodyUsesMPS(t *testing.T) {
	withOwnMounts(t, func(g *gomega.WithT) {
		mpsRoot := filepath.Join(t.TempDir(), "mps")
		shm := filepath.Join(mpsRoot, "shm")
		wish := filepath.Join(mpsRoot, "gpusharing", "nvidia.com_gpu.json")
		hosts := func() {
			g.Expect(run(t.Context(), []string{"mps-prepare", "--mps-root=" + mpsRoot})).To(gomega.Succeed())
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- run(ctx, []string{"mps-host", "--mps-root=" + mpsRoot, "--driver-root=" + mpsRoot}) }()
			g.Consistently(done, "1s").ShouldNot(gomega.Receive())
			stop()
			g.Eventually(done, "30s").Should(gomega.Receive(gomega.Succeed()))
		}
		mounted := func() bool {
			mounts, err := os.ReadFile("/proc/self/mounts")
			g.Expect(err).NotTo(gomega.HaveOccurred())
			return strings.Contains(string(mounts), " "+shm+" ")
		}
		g.Expect(os.MkdirAll(filepath.Dir(wish), 0o755)).To(gomega.Succeed())
		g.Expect(os.WriteFile(wish, []byte(`{"Resource": "nvidia.com/gpu", "ActiveThreadPercentage": 25}`), 0o600)).To(gomega.Succeed())
		hosts()
		g.Expect(mounted()).To(gomega.BeTrue(), "pods go on to have it when the MPS pod starts again")

		record := filepath.Join(mpsRoot, "nvidia.com", "gpu", ".gpusharing.json")
		g.Expect(os.Remove(wish)).To(gomega.Succeed())
		g.Expect(os.RemoveAll(record)).To(gomega.Succeed())
		hosts()
		g.Expect(mounted()).To(gomega.BeFalse())
	})
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
