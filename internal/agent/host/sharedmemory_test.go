// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

func TestSharedMemoryIsMountedOnce(t *testing.T) {
	g := NewWithT(t)
	folder := filepath.Join(t.TempDir(), "mps", "shm")
	err := host.MountSharedMemory(folder, "pod")
	if errors.Is(err, unix.EPERM) {
		t.Skip("mounting needs root")
	}
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { g.Expect(unix.Unmount(folder, 0)).To(Succeed()) })
	var stat unix.Statfs_t
	g.Expect(unix.Statfs(folder, &stat)).To(Succeed())
	g.Expect(stat.Type).To(BeEquivalentTo(unix.TMPFS_MAGIC))
	g.Expect(stat.Flags & unix.ST_NOEXEC).NotTo(BeZero())
	info, err := os.Stat(folder)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(info.Mode()).To(Equal(os.ModeDir|os.ModeSticky|0o777), "clients of any user use it")

	kept := filepath.Join(folder, "of-a-client")
	g.Expect(os.WriteFile(kept, nil, 0o600)).To(Succeed())
	g.Expect(host.MountSharedMemory(folder, "pod")).To(Succeed())
	g.Expect(kept).To(BeAnExistingFile(), "a restarted pod mounts nothing over what clients use")
}

func TestSharedMemoryOfAnotherProgramStays(t *testing.T) {
	g := NewWithT(t)
	folder := filepath.Join(t.TempDir(), "shm")
	g.Expect(os.Mkdir(folder, 0o755)).To(Succeed())
	g.Expect(host.UnmountSharedMemory(folder, "pod")).To(Succeed(), "nothing is mounted there")
	mounted := func() bool {
		mounts, err := os.ReadFile("/proc/self/mounts")
		g.Expect(err).NotTo(HaveOccurred())
		return strings.Contains(string(mounts), " "+folder+" ")
	}
	if err := host.MountSharedMemory(folder, "pod"); errors.Is(err, unix.EPERM) {
		t.Skip("mounting needs root")
	} else {
		g.Expect(err).NotTo(HaveOccurred())
	}
	g.Expect(unix.Mount("shm", folder, "tmpfs", 0, "")).To(Succeed()) // as NVIDIA's mount-shm
	g.Expect(host.UnmountSharedMemory(folder, "pod")).To(Succeed())
	g.Expect(mounted()).To(BeTrue())
	g.Expect(unix.Unmount(folder, 0)).To(Succeed())
	g.Expect(mounted()).To(BeTrue(), "the one below")
	g.Expect(host.UnmountSharedMemory(folder, "pod")).To(Succeed())
	g.Expect(mounted()).To(BeFalse())
}

func TestSharedMemoryBelowALinkIsUnmounted(t *testing.T) {
	g := NewWithT(t)
	root := t.TempDir()
	folder := filepath.Join(root, "run", "shm")
	g.Expect(os.Mkdir(filepath.Join(root, "run"), 0o755)).To(Succeed())
	g.Expect(os.Symlink("run", filepath.Join(root, "var-run"))).To(Succeed())
	linked := filepath.Join(root, "var-run", "shm")
	if err := host.MountSharedMemory(linked, "pod"); errors.Is(err, unix.EPERM) {
		t.Skip("mounting needs root")
	} else {
		g.Expect(err).NotTo(HaveOccurred())
	}
	t.Cleanup(func() { _ = unix.Unmount(folder, 0) })
	g.Expect(host.UnmountSharedMemory(linked, "pod")).To(Succeed())
	mounts, err := os.ReadFile("/proc/self/mounts")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(mounts)).NotTo(ContainSubstring(folder))
}

func TestSharedMemoryIsUnmountedByWhoUsesItNow(t *testing.T) {
	g := NewWithT(t)
	folder := filepath.Join(t.TempDir(), "shm")
	if err := host.MountSharedMemory(folder, "first"); errors.Is(err, unix.EPERM) {
		t.Skip("mounting needs root")
	} else {
		g.Expect(err).NotTo(HaveOccurred())
	}
	t.Cleanup(func() { _ = unix.Unmount(folder, 0) })
	mounted := func() bool {
		mounts, err := os.ReadFile("/proc/self/mounts")
		g.Expect(err).NotTo(HaveOccurred())
		return strings.Contains(string(mounts), " "+folder+" ")
	}
	g.Expect(host.MountSharedMemory(folder, "second")).To(Succeed())
	g.Expect(host.UnmountSharedMemory(folder, "first")).To(Succeed())
	g.Expect(mounted()).To(BeTrue())

	g.Expect(os.Remove(folder + ".owner")).To(Succeed()) // as a release that recorded none mounted it
	g.Expect(host.UnmountSharedMemory(folder, "first")).To(Succeed())
	g.Expect(mounted()).To(BeFalse())
}

func TestSharedMemoryThatNobodyMountedIsGoneAlready(t *testing.T) {
	NewWithT(t).Expect(host.UnmountSharedMemory(filepath.Join(t.TempDir(), "mps", "shm"), "pod")).To(Succeed())
}

func TestLabelForContainers(t *testing.T) {
	g := NewWithT(t)
	folder := t.TempDir()
	file := filepath.Join(folder, "pipe")
	g.Expect(os.WriteFile(file, nil, 0o600)).To(Succeed())
	g.Expect(host.LabelForContainers(folder)).To(Succeed())
	if _, err := os.Stat("/sys/fs/selinux"); err != nil {
		t.Skip("no SELinux here, so nothing to look at")
	}
	label := make([]byte, 64)
	n, err := unix.Lgetxattr(file, "security.selinux", label)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(label[:n])).To(ContainSubstring("container_file_t"))
}
