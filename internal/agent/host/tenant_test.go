// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// link makes the links of a fake proc file system, which lead nowhere.
func link(t *testing.T, dir string, links map[string]string) {
	t.Helper()
	for name, target := range links {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, file); err != nil {
			t.Fatal(err)
		}
	}
}

// procOf is a fake proc file system.
func procOf(t *testing.T, files, links map[string]string) *host.Proc {
	t.Helper()
	dir := t.TempDir()
	link(t, dir, links)
	for name, content := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	return host.NewProc(root)
}

func TestAProcessIsNVIDIAsByItsPIDNamespaceNotByItsName(t *testing.T) {
	g := NewWithT(t)
	const server = "nvidia-cuda-mps-server"
	proc := newProc(t, map[string]string{
		"7/cmdline": server + "\x00", "8/cmdline": server + "\x00", "9/cmdline": server + "\x00", "7/status": "NSpid:\t7\n", "8/status": "NSpid:\t8\t1\n",
	})
	g.Expect(proc.Describe(7).Runs(server)).To(BeTrue())
	g.Expect(proc.Describe(8).Runs(server)).To(BeFalse(), "a container without hostPID calls its processes as it likes")
	g.Expect(proc.Describe(9).Runs(server)).To(BeFalse(), "one that is gone")
	g.Expect(proc.Describe(7).Runs("another")).To(BeFalse())
}

func TestMountedFindsWhoWasGivenAFolderOfTheNode(t *testing.T) {
	g := NewWithT(t)
	const (
		pipe, other = "/run/nvidia/mps/nvidia.com/gpu/pipe", "/run/nvidia/mps/nvidia.com/gpu.shared/pipe"
		own         = "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n21 20 0:99 / /run rw - tmpfs run rw\n" +
			"22 21 0:25 /nvidia/mps /run/nvidia/mps rw shared:1 - tmpfs memory rw\n23 22 0:77 / /run/nvidia/mps/shm rw - tmpfs shm rw\n"
		client = "40 1 0:50 / / rw - overlay layers rw\n41 40 0:25 /nvidia/mps/nvidia.com/gpu/pipe /mps/nvidia.com/gpu/pipe rw - tmpfs memory rw\n"
	)
	proc := procOf(t, map[string]string{
		"1/mountinfo": own, "10/mountinfo": client,
		"11/mountinfo": client, // shares the mounts of 10
		"12/mountinfo": "50 1 0:51 / / rw - overlay layers rw\n51 50 0:25 /nvidia/mps /mps rw - tmpfs memory rw\n",
		"13/mountinfo": "60 1 0:52 / / rw - overlay layers rw\n61 60 0:66 /nvidia/mps/nvidia.com/gpu/pipe /mps/nvidia.com/gpu/pipe rw - tmpfs memory rw\n",
		"13/environ":   "CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe\x00",
	}, map[string]string{"self": "1"})
	g.Expect(proc.Mounted(pipe, other)).To(Equal(map[string][]int{pipe: {10, 11}}),
		"neither NVIDIA's device plugin, which has the whole MPS root, nor a tenant with a file system of its own that looks the same")
	g.Expect(proc.Mounted()).To(BeEmpty())
}

// TestMountedOfThisMachine: what the kernel itself writes.
func TestMountedOfThisMachine(t *testing.T) {
	g := NewWithT(t)
	folder := t.TempDir()
	pid := tenant(t, folder, "true")
	found, err := procOfThisMachine(t).Mounted(folder, "/proc/nothing")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(found).To(Equal(map[string][]int{folder: {pid}}))
}

func mounts(out interface{ Read([]byte) (int, error) }, said []byte) bool {
	n, err := out.Read(said)
	return err == nil && strings.HasPrefix(string(said[:n]), "mounted")
}

func TestListenerIsTheProcessThatTheKernelHasNoted(t *testing.T) {
	g := NewWithT(t)
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30)) // longer than an address has room for
	g.Expect(os.Mkdir(dir, 0o755)).To(Succeed())
	t.Chdir(dir)
	l, err := net.Listen("unix", "control")
	g.Expect(err).NotTo(HaveOccurred())
	defer l.Close() //nolint:errcheck // nothing was sent
	root, err := os.OpenRoot("/proc")
	g.Expect(err).NotTo(HaveOccurred())
	defer root.Close() //nolint:errcheck // only read
	proc := host.NewProc(root)

	first, err := proc.Listener(filepath.Join(dir, "control"))
	g.Expect(first.Known, err).To(BeTrue())
	g.Expect(first.Process).To(Equal(proc.Describe(os.Getpid())))
	g.Expect(proc.Listener(filepath.Join(dir, "nothing"))).To(BeZero())

	g.Expect(os.Symlink("control", "link")).To(Succeed())
	_, err = proc.Listener(filepath.Join(dir, "link"))
	g.Expect(err).To(MatchError(host.ErrNoSocket), "a link may lead to a file system that answers to nobody")
	g.Expect(os.Rename("control", "kept")).To(Succeed())
	other, err := net.Listen("unix", "control")
	g.Expect(err).NotTo(HaveOccurred())
	defer other.Close() //nolint:errcheck // nothing was sent
	second, err := proc.Listener(filepath.Join(dir, "control"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(second.Socket).NotTo(Equal(first.Socket))
}

func TestProjectedLooksAtNothingButVolumesOfTheKubelet(t *testing.T) {
	g := NewWithT(t)
	onNode := t.TempDir()
	volumes := filepath.Join(onNode, "data/kubelet/pods", podUID, "volumes")
	config := filepath.Join(volumes, "kubernetes.io~configmap/available-configs")
	g.Expect(os.MkdirAll(filepath.Join(config, "..2027"), 0o755)).To(Succeed())
	g.Expect(os.Symlink("..2027", filepath.Join(config, "..data"))).To(Succeed())
	g.Expect(os.WriteFile(filepath.Join(config, "..2027", "research"), nil, 0o600)).To(Succeed())
	g.Expect(os.Symlink("..data/research", filepath.Join(config, "research"))).To(Succeed())
	g.Expect(os.MkdirAll(filepath.Join(volumes, "kubernetes.io~nfs/hangs"), 0o755)).To(Succeed())
	g.Expect(os.WriteFile(filepath.Join(volumes, "kubernetes.io~nfs/hangs/other"), nil, 0o600)).To(Succeed())
	g.Expect(os.MkdirAll(filepath.Join(onNode, "var/lib"), 0o755)).To(Succeed())
	g.Expect(os.Symlink("/data/kubelet", filepath.Join(onNode, "var/lib/kubelet"))).To(Succeed())

	kubelet := host.Kubelet{Host: onNode, Folder: "/var/lib/kubelet"}
	g.Expect(kubelet.Projected(podUID, "research")).To(BeTrue(), "also where the folder is a link on the node")
	g.Expect(kubelet.Projected(podUID, "other")).To(BeFalse(), "a volume that is mounted from elsewhere")
	g.Expect(kubelet.Projected(victimUID, "research")).To(BeFalse())
	for _, name := range []string{"", "..", "../../x", "a/b"} {
		g.Expect(kubelet.Projected(name, "research")).To(BeFalse())
		g.Expect(kubelet.Projected(podUID, name)).To(BeFalse())
	}
}

func TestPrivilegedIsWhoMayAdministerTheNode(t *testing.T) {
	g := NewWithT(t)
	const all, usual = "CapEff:\t000001ffffffffff\n", "CapEff:\t00000000a80425fb\n" // of a privileged container, and by default
	proc := procOf(t, map[string]string{"7/status": all, "8/status": usual, "9/status": all, "10/status": "Name:\tx\n"}, map[string]string{
		"self": "1", "1/ns/user": "user:[4026531837]", "7/ns/user": "user:[4026531837]", "8/ns/user": "user:[4026531837]",
		"9/ns/user": "user:[4026532999]", "10/ns/user": "user:[4026531837]",
	})
	g.Expect(proc.Privileged(7)).To(BeTrue())
	g.Expect(proc.Privileged(8)).To(BeFalse())
	g.Expect(proc.Privileged(9)).To(BeFalse(), "any process has all capabilities in a user namespace of its own")
	g.Expect(proc.Privileged(10)).To(BeFalse())
	g.Expect(proc.Privileged(11)).To(BeFalse(), "one that is gone")
}

// TestAProcessIsNotReadWithoutEnd: any process may name terabytes of its own memory as its arguments and environment.
func TestAProcessIsNotReadWithoutEnd(t *testing.T) {
	dir := t.TempDir()
	link(t, dir, map[string]string{"self": "7", "7/ns/user": "user:[1]"})
	const endless = 256 << 20
	for _, name := range []string{"cmdline", "environ", "comm", "status", "cgroup", "mountinfo"} {
		file := filepath.Join(dir, "7", name)
		if err := errors.Join(os.WriteFile(file, []byte("config-manager\x00A=B\x00\nNSpid:\t7\n"), 0o600), os.Truncate(file, endless)); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	proc := host.NewProc(root)
	for name, look := range map[string]func(){
		"Describe": func() { proc.Describe(7) }, "Running": func() { _, _ = proc.Running("config-manager") },
		"Environment": func() { proc.Environment(7) }, "Arguments": func() { proc.Arguments(7) }, "User": func() { proc.User(7) },
		"WithVariable": func() { _, _ = proc.WithVariable("B") }, "Privileged": func() { proc.Privileged(7) },
		"Mounted": func() { _, _ = proc.Mounted("/run/nvidia/mps") },
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			look()
			runtime.ReadMemStats(&after)
			NewWithT(t).Expect(after.TotalAlloc - before.TotalAlloc).To(BeNumerically("<", endless/4))
		})
	}
}
