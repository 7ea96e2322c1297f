// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// TestControlGroupsOfPods: as kubelets name those of pods, and containerd and CRI-O with runc or crun those of containers.
func TestControlGroupsOfPods(t *testing.T) {
	const uid, spelled, slice = "0a1b2c3d-0000-4000-8000-000000000001", "0a1b2c3d_0000_4000_8000_000000000001", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
	sandbox, main := strings.Repeat("a", 64), strings.Repeat("b", 64)
	for name, tc := range map[string]struct {
		pod               string
		folders           []string
		containers, inner []string
		uid               string
		begun             bool
	}{
		"containerd, cgroupfs":        {"kubepods/burstable/pod" + uid, []string{sandbox, main}, []string{sandbox, main}, nil, uid, true},
		"containerd, systemd, early":  {slice + spelled + ".slice", []string{"cri-containerd-" + sandbox + ".scope"}, []string{"cri-containerd-" + sandbox + ".scope"}, nil, uid, false},
		"CRI-O, cgroupfs, no sandbox": {"kubepods/pod" + uid, []string{"crio-" + main, "crio-conmon-" + main}, []string{"crio-" + main}, nil, uid, true},
		"CRI-O, systemd, crun": {
			slice + spelled + ".slice",
			[]string{"crio-" + main + ".scope/container", "crio-" + main + ".scope/mine", "crio-conmon-" + main + ".scope"},
			[]string{"crio-" + main + ".scope"},
			[]string{"crio-" + main + ".scope/container"},
			uid, true,
		},
		"a static pod": {"kubepods/pod" + sandbox[:32], nil, nil, nil, sandbox[:32], false},
	} {
		t.Run(name, func(t *testing.T) {
			g, root := NewWithT(t), t.TempDir()
			for _, dir := range append(tc.folders, "") {
				g.Expect(os.MkdirAll(filepath.Join(root, tc.pod, dir), 0o700)).To(Succeed())
			}
			g.Expect(os.WriteFile(filepath.Join(root, tc.pod, "dmem.max"), nil, 0o600)).To(Succeed())
			found, err := host.Cgroups{Folder: root}.Pods()
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(found).To(HaveLen(1))
			paths := func(all []host.Cgroup) (names []string) {
				for _, c := range all {
					g.Expect(c.Controllers).To(BeEmpty(), "crun enables dmem for pods alone")
					names = append(names, strings.TrimPrefix(c.Path, filepath.Join(root, tc.pod)+"/"))
				}
				return names
			}
			g.Expect(found[0].UID).To(Equal(tc.uid))
			g.Expect(found[0].Controllers).To(Equal([]string{"dmem"}))
			g.Expect(paths(found[0].Containers)).To(Equal(tc.containers))
			g.Expect(paths(found[0].Inner)).To(Equal(tc.inner))
			g.Expect(found[0].Begun()).To(Equal(tc.begun))
		})
	}
}

func TestUserIsTheEffectiveOne(t *testing.T) {
	g := NewWithT(t)
	p := proc(t, map[string]string{"12/status": "Name:\tpython\nUid:\t0\t1000650000\t0\t0\nGid:\t0\t0\t0\t0\n", "13/status": "Name:\tx\n"})
	uid, runs := p.User(12)
	g.Expect(runs).To(BeTrue())
	g.Expect(uid).To(Equal(int64(1000650000)))
	_, runs = p.User(13)
	g.Expect(runs).To(BeFalse())
	_, runs = p.User(14)
	g.Expect(runs).To(BeFalse(), "one that is gone")
}

func TestWithVariableFindsProcessesByTheirEnvironment(t *testing.T) {
	g := NewWithT(t)
	p := newProc(t, map[string]string{
		"12/status": "NSpid:\t12\n", "13/status": "NSpid:\t13\n", "14/status": "NSpid:\t14\n", "15/status": "NSpid:\t15\t1\n",
		"12/environ": "HOME=/root\x00CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe\x00",
		"13/environ": "NOT_CUDA_MPS_PIPE_DIRECTORY=x\x00",
		"14/comm":    "kthreadd\n",
		"15/environ": "CUDA_MPS_PIPE_DIRECTORY=x\x00",
	})
	g.Expect(p.WithVariable("CUDA_MPS_PIPE_DIRECTORY")).To(Equal(map[int]string{12: "/mps/nvidia.com/gpu/pipe"}), "a container's process names what it likes")
}

// proc is a proc file system with some files.
func proc(t *testing.T, files map[string]string) *host.Proc {
	t.Helper()
	g, dir := NewWithT(t), t.TempDir()
	for name, content := range files {
		g.Expect(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o750)).To(Succeed())
		g.Expect(os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600)).To(Succeed())
	}
	root := openRoot(t, dir)
	return host.NewProc(root)
}
