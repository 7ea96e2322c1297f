// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"os"
	"path/filepath"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

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
