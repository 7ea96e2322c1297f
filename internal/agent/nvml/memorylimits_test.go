// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// limitEnv makes the test program limit a cgroup through the library it names, print what came of it and end: a process
// has one NVML library in its life. limitGPU and limitCgroup name the GPU and the cgroup.
const (
	limitEnv    = "GPUTEST_LIMIT"
	limitGPU    = "GPUTEST_LIMIT_GPU"
	limitCgroup = "GPUTEST_LIMIT_CGROUP"
)

// limitAnswer is what such a process found.
type limitAnswer struct {
	Support       gpu.MemoryLimitSupport
	Set           gpu.MemoryLimit
	Cleared       gpu.MemoryLimit
	Unsupported   bool // the errors say so
	Gone          bool // a cgroup that is not there
	SetErr, Error string
}

func limitAndPrint(library string) int {
	ctx, uuid, cgroup := context.Background(), os.Getenv(limitGPU), os.Getenv(limitCgroup)
	h := nvml.New(nvml.Options{Library: library})
	var a limitAnswer
	var err error
	const lost = "GPU-00000000-0000-0000-0000-000000000000"
	if a.Support, err = h.LimitsMemory(ctx, lost, uuid); err != nil {
		a.Error = err.Error()
	}
	if err = h.SetMemoryLimit(ctx, uuid, cgroup, 0, 1<<30); err != nil {
		a.SetErr, a.Unsupported = err.Error(), errors.Is(err, gpu.ErrNotSupported)
	} else {
		a.Set, err = h.MemoryLimit(ctx, uuid, cgroup)
		err = errors.Join(err, h.SetMemoryLimit(ctx, uuid, cgroup, 0, gpu.NoMemoryLimit))
		a.Cleared, _ = h.MemoryLimit(ctx, uuid, cgroup)
	}
	_, gone := h.MemoryLimit(ctx, uuid, filepath.Join(cgroup, "nowhere"))
	a.Gone = errors.Is(gone, gpu.ErrGone)
	if err := errors.Join(err, h.Close()); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	_ = json.NewEncoder(os.Stdout).Encode(a)
	return 0
}

// limitThrough asks a new process with a driver of that version.
func limitThrough(t *testing.T, version string, persistence bool) limitAnswer {
	t.Helper()
	g := NewWithT(t)
	cache, err := simdriver.CacheDir()
	g.Expect(err).NotTo(HaveOccurred())
	programs, err := simdriver.Build(t.Context(), cache)
	g.Expect(err).NotTo(HaveOccurred())
	d, err := simdriver.New(t.TempDir(), programs, simdriver.Spec{Name: t.Name(), Models: []sim.Model{sim.A100}, DriverVersion: version})
	g.Expect(err).NotTo(HaveOccurred())
	cgroups, uuid := t.TempDir(), ""
	pod := filepath.Join(cgroups, "pod")
	g.Expect(os.Mkdir(pod, 0o700)).To(Succeed())
	g.Expect(os.WriteFile(filepath.Join(pod, "dmem.max"), nil, 0o600)).To(Succeed())
	g.Expect(d.Update(func(s *simdriver.State) error {
		s.Node.Cgroups = sim.Cgroups{Backend: sim.Dmem, Root: cgroups}
		s.Node.GPUs[0].Persistence, uuid = persistence, s.Node.GPUs[0].UUID
		return nil
	})).To(Succeed())
	c := exec.CommandContext(t.Context(), "/proc/self/exe")
	c.Env = append(os.Environ(), limitEnv+"="+filepath.Join(d.Root(), "usr/lib64/libnvidia-ml.so.1"), limitGPU+"="+uuid, limitCgroup+"="+pod)
	c.Stderr = os.Stderr
	out, err := c.Output()
	g.Expect(err).NotTo(HaveOccurred(), string(out))
	var a limitAnswer
	g.Expect(json.Unmarshal(out, &a)).To(Succeed(), string(out))
	return a
}

func TestADriverOf615LimitsACgroup(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root sets limits")
	}
	g := NewWithT(t)
	a := limitThrough(t, "615.71.09", true)
	g.Expect(a.Support).To(Equal(gpu.MemoryLimitSupport{Version: "615.71.09", Calls: true}))
	g.Expect(a.SetErr).To(BeEmpty())
	g.Expect(a.Set).To(Equal(gpu.MemoryLimit{Hard: 1 << 30}))
	g.Expect(a.Cleared).To(Equal(gpu.MemoryLimit{Hard: gpu.NoMemoryLimit}))
	g.Expect(a.Gone).To(BeTrue())
	a = limitThrough(t, "615.71.09", false)
	g.Expect(a.Support.Fleeting).To(HaveLen(1), "nothing keeps the GPU initialized")
}

// go-nvml binds a call when it is made, and a library without it ends the process.
func TestADriverBefore615IsAskedForNoLimit(t *testing.T) {
	g := NewWithT(t)
	a := limitThrough(t, "580.95.05", true)
	g.Expect(a.Support).To(Equal(gpu.MemoryLimitSupport{Version: "580.95.05"}))
	g.Expect(a.Unsupported).To(BeTrue())
	g.Expect(a.SetErr).To(ContainSubstring("the driver has no memory limits"))
}
