// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver_test

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/gputest"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// driver615 has memory limits.
const driver615 = "615.71.09"

// TestMemoryLimits holds NVML of the simulated driver to what NVIDIA's says and does.
func TestMemoryLimits(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root sets limits")
	}
	g := NewWithT(t)
	spec := simdriver.Spec{Name: t.Name(), Models: []sim.Model{sim.A100, sim.A100}, DriverVersion: driver615}
	d := rootOf(t, spec)
	lib := nvml.New(nvml.WithLibraryPath(filepath.Join(d.Root(), "usr/lib64/libnvidia-ml.so.1")))
	g.Expect(lib.Init()).To(Equal(nvml.SUCCESS))
	t.Cleanup(func() { _ = lib.Shutdown() })
	gputest.MemoryLimitContract(t, func(t *testing.T, b sim.Backend) gputest.MemoryLimits {
		t.Helper()
		NewWithT(t).Expect(d.Replace(spec)).To(Succeed())
		update := func(change func(*sim.Node) error) error {
			return d.Update(func(s *simdriver.State) error { return change(&s.Node) })
		}
		limits := nvmlLimits{gputest.NewSimulatedCgroups(t, b, update), t, d, lib}
		limits.See = limits.see
		return limits
	})
}

// nvmlLimits are the memory limits of a driver by its library.
type nvmlLimits struct {
	gputest.SimulatedCgroups
	t   *testing.T
	d   *simdriver.Driver
	lib nvml.Interface
}

func (l nvmlLimits) device(uuid string) nvml.Device {
	l.t.Helper()
	device, ret := l.lib.DeviceGetHandleByUUID(uuid)
	NewWithT(l.t).Expect(ret).To(Equal(nvml.SUCCESS))
	return device
}

func (l nvmlLimits) Set(gpu, cgroup string, soft, hard uint64) sim.Return {
	return sim.Return(l.device(gpu).SetMemoryLimits_v1(cgroup, soft, hard))
}

func (l nvmlLimits) SetByUser(gpu, cgroup string, soft, hard uint64) sim.Return {
	return gputest.ByUser(func() sim.Return { return l.Set(gpu, cgroup, soft, hard) })
}

func (l nvmlLimits) Get(gpu, cgroup string) (sim.MemoryLimit, sim.Return) {
	got, ret := l.device(gpu).GetMemoryLimits_v1(cgroup)
	return sim.MemoryLimit{Soft: got.SoftLimit, Hard: got.HardLimit, Used: got.CurrentUsed}, sim.Return(ret)
}

// see asks NVML as a program would that is in the cgroup of another.
func (l nvmlLimits) see(uuid string, pid int) (*gpu.Memory, error) {
	err := l.Node(func(n *sim.Node) error { n.Cgroups.Members[os.Getpid()] = n.Cgroups.Members[pid]; return nil })
	seen, ret := l.device(uuid).GetMemoryInfo_v2()
	if ret != nvml.SUCCESS {
		err = errors.Join(err, ret)
	}
	return &gpu.Memory{Total: int64(seen.Total), Used: int64(seen.Used), Free: int64(seen.Free)}, err
}

// Disturb closes the driver for it, as it must be.
func (l nvmlLimits) Disturb(how gputest.Disturbance) error {
	if how == gputest.LastClose {
		if err := l.Node(func(n *sim.Node) error { n.Forgets = true; return nil }); err != nil {
			return err
		}
	}
	if ret := l.lib.Shutdown(); ret != nvml.SUCCESS {
		return ret
	}
	var err error
	switch how {
	case gputest.LastClose:
	case gputest.Reset:
		if out, status := smi(l.t, l.d, "--gpu-reset"); status != 0 {
			err = fmt.Errorf("nvidia-smi ended with %d: %s", status, out)
		}
	case gputest.Reload:
		err = errors.Join(l.d.UnloadModule(), l.d.LoadModule(driver615))
	case gputest.DaemonReload:
		err = errors.ErrUnsupported
	}
	if ret := l.lib.Init(); ret != nvml.SUCCESS {
		err = errors.Join(err, ret)
	}
	return err
}

func TestDriversBefore615LackMemoryLimits(t *testing.T) {
	g := NewWithT(t)
	for version, has := range map[string]bool{"580.95.05": false, "610.10.01": false, driver615: true, "620.01": true} {
		spec := simdriver.Spec{Name: t.Name(), DriverVersion: version}
		library, err := elf.Open(filepath.Join(rootOf(t, spec).Root(), "usr/lib64/libnvidia-ml.so.1"))
		g.Expect(err).NotTo(HaveOccurred())
		symbols, err := library.DynamicSymbols()
		g.Expect(err).NotTo(HaveOccurred())
		for _, call := range []string{"nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"} {
			defined := And(HaveField("Name", call), HaveField("Section", Not(Equal(elf.SHN_UNDEF))))
			g.Expect(ContainElement(defined).Match(symbols)).To(Equal(has), version)
		}
		g.Expect(library.Close()).To(Succeed())
	}
}
