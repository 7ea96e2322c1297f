// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

const (
	podUID = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
	podDNS = "0a1b2c3d_4e5f_6071_8293_a4b5c6d7e8f9"
	// victimUID is a pod that a tenant would like to be taken for.
	victimUID = "22222222-2222-2222-2222-222222222222"
)

var container = strings.Repeat("0123abcd", 8)

func TestDescribe(t *testing.T) {
	inPod := host.Process{Name: "python3", PodUID: podUID, ContainerID: container}
	tests := map[string]struct {
		cgroup string
		want   host.Process
	}{
		"cgroup v2, systemd, containerd": {
			cgroup: "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + podDNS + ".slice/cri-containerd-" + container + ".scope\n",
			want:   inPod,
		},
		"cgroup v2, systemd, a guaranteed pod under CRI-O": {
			cgroup: "0::/kubepods.slice/kubepods-pod" + podDNS + ".slice/crio-" + container + ".scope/container\n", want: inPod,
		},
		"cgroup v2, cgroupfs": {cgroup: "0::/kubepods/burstable/pod" + podUID + "/" + container + "\n", want: inPod},
		"cgroup v2, seen from another cgroup namespace": {
			cgroup: "0::/../../kubepods-burstable-pod" + podDNS + ".slice/cri-containerd-" + container + ".scope\n", want: inPod,
		},
		"cgroup v1, several controllers": {
			cgroup: "12:pids:/\n4:memory:/kubepods/besteffort/pod" + podUID + "/" + container + "\n1:name=systemd:/kubepods\n", want: inPod,
		},
		"cgroup v1, Docker under systemd": {
			cgroup: "4:cpu,cpuacct:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + podDNS + ".slice/docker-" + container + ".scope\n",
			want:   inPod,
		},
		"a cgroup nested in the container": {
			cgroup: "0::/kubepods/pod" + podUID + "/" + container + "/system.slice/app.service\n", want: inPod,
		},
		"cgroups that the container has named like another pod's": {
			cgroup: "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + podDNS + ".slice/cri-containerd-" + container +
				".scope/pod" + victimUID + "/" + strings.Repeat("b", 64) + "\n",
			want: inPod,
		},
		"a cgroup in a pod's own, named like another pod": {
			cgroup: "0::/kubepods/pod" + podUID + "/pod" + victimUID + "/" + container + "\n", want: host.Process{Name: "python3", PodUID: podUID},
		},
		"a container that is not Kubernetes', with a cgroup like a pod's": {
			cgroup: "0::/system.slice/docker-" + container + ".scope/kubepods/pod" + victimUID + "/" + container + "\n",
			want:   host.Process{Name: "python3"},
		},
		"a static pod, whose uid is a hash": {
			cgroup: "0::/kubepods.slice/kubepods-pod" + strings.Repeat("ab12", 8) + ".slice/cri-containerd-" + container + ".scope\n",
			want:   host.Process{Name: "python3", PodUID: strings.Repeat("ab12", 8), ContainerID: container},
		},
		"a pod's own cgroup has no container":  {cgroup: "0::/kubepods/pod" + podUID + "\n", want: host.Process{Name: "python3", PodUID: podUID}},
		"a process of the host":                {cgroup: "0::/system.slice/nvidia-persistenced.service\n", want: host.Process{Name: "python3"}},
		"a container that is not Kubernetes'":  {cgroup: "0::/system.slice/docker-" + container + ".scope\n", want: host.Process{Name: "python3"}},
		"a folder that only begins like a pod": {cgroup: "0::/kubepods/podcast/" + container + "\n", want: host.Process{Name: "python3"}},
		"a line that is no cgroup":             {cgroup: "nonsense\n", want: host.Process{Name: "python3"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			proc := newProc(t, map[string]string{"42/comm": "python3.11-lon\n", "42/cmdline": "/usr/bin/python3\x00train.py\x00", "42/cgroup": tc.cgroup})
			g.Expect(proc.Describe(42)).To(Equal(tc.want))
		})
	}
}

func TestDescribeNames(t *testing.T) {
	g := NewWithT(t)
	proc := newProc(t, map[string]string{"7/comm": "kworker/0:1\n", "7/cmdline": "", "9/cmdline": "\x1b[2Jfree\xff\nGPU\x00"})
	g.Expect(proc.Describe(7)).To(Equal(host.Process{Name: "kworker/0:1"}), "a kernel thread has no command line")
	g.Expect(proc.Describe(8)).To(Equal(host.Process{}), "a process that is gone")
	g.Expect(proc.Describe(9).Name).To(Equal("?[2Jfree??GPU"), "a process calls itself as it likes")
}

func TestBootID(t *testing.T) {
	g := NewWithT(t)
	id, err := newProc(t, map[string]string{"sys/kernel/random/boot_id": "6ac2a8f4-9d1e-4c43-a0d5-1d5b1f5d0a3c\n"}).ID()
	g.Expect(id, err).To(Equal("6ac2a8f4-9d1e-4c43-a0d5-1d5b1f5d0a3c"))
	_, err = newProc(t, nil).ID()
	g.Expect(err).To(MatchError(ContainSubstring("reading the boot id: ")))
}

func TestProcOfThisMachine(t *testing.T) {
	g := NewWithT(t)
	root := openRoot(t, "/proc")
	proc := host.NewProc(root)
	g.Expect(proc.Describe(os.Getpid()).Name).To(Equal(filepath.Base(os.Args[0])))
	id, err := proc.ID()
	g.Expect(id, err).To(HaveLen(36))
	comm := filepath.Base(os.Args[0])
	g.Expect(proc.Running(comm[:min(len(comm), 15)])).To(ContainElement(os.Getpid()))
	g.Expect(proc.Describe(os.Getpid()).HostPIDs).To(BeTrue(), "the host's PID namespace is that of this process")
}

func TestPrograms(t *testing.T) {
	g := NewWithT(t)
	proc := newProc(t, map[string]string{
		"7/comm": "config-manager\n", "7/environ": "A=1\x00B=x=y\x00",
		"8/comm": "sh\n", "8/cmdline": "config-manager\x00", "self/comm": "config-manager\n",
	})
	g.Expect(proc.Running("config-manager")).To(Equal([]int{7}))
	g.Expect(proc.Environment(7)).To(Equal(map[string]string{"A": "1", "B": "x=y"}))
	g.Expect(proc.Environment(8)).To(BeEmpty())
}

func newProc(t *testing.T, files map[string]string) *host.Proc {
	t.Helper()
	return procOf(t, files, nil)
}

func TestAProcessIsKilledByItsPID(t *testing.T) {
	g := NewWithT(t)
	root := openRoot(t, "/proc")
	proc := host.NewProc(root)
	sleep := exec.CommandContext(t.Context(), "sleep", "1h")
	g.Expect(sleep.Start()).To(Succeed())
	pid := sleep.Process.Pid
	g.Eventually(func() []string { return proc.Arguments(pid) }).Should(Equal([]string{"sleep", "1h"}))

	g.Expect(proc.Kill(pid)).To(Succeed())
	g.Expect(sleep.Wait()).To(MatchError("signal: killed"))
	g.Expect(proc.Arguments(pid)).To(BeEmpty())
	g.Expect(proc.Kill(pid)).To(Succeed(), "one that is gone is no error")
}

// openRoot opens a folder for as long as a test takes.
func openRoot(t *testing.T, folder string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	return root
}

// TestACutStatusSaysNothing: the kernel lists the groups of a process, as many as 65536, before NSpid and CapEff.
func TestACutStatusSaysNothing(t *testing.T) {
	const server = "nvidia-cuda-mps-server"
	for _, at := range []int{64 << 10, 1 << 20} {
		g := NewWithT(t)
		cut := func(visible, hidden string) string {
			return "Groups:\t" + strings.Repeat("1", at-len("Groups:\t\n")-len(visible)) + "\n" + visible + hidden + "\n"
		}
		proc := procOf(t, map[string]string{
			"7/status": cut("CapEff:\t00000000a80425", "fb"), "8/status": cut("NSpid:\t8", "\t1"), "8/cmdline": server + "\x00",
		}, map[string]string{"self": "1", "1/ns/user": "user:[4026531837]", "7/ns/user": "user:[4026531837]"})
		g.Expect(proc.Describe(8).Runs(server)).To(BeFalse(), "it is in a PID namespace of its own")
		g.Expect(proc.Privileged(7)).To(BeFalse(), "a container has 00000000a80425fb by default")
	}
}
