// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"errors"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/gputest"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestMemoryLimits(t *testing.T) {
	gputest.MemoryLimitContract(t, func(t *testing.T, b sim.Backend) gputest.MemoryLimits { return limitedNode(t, b) })
}

// limits are the memory limits of a node in memory.
type limits struct {
	gputest.SimulatedCgroups
	h *sim.Hardware
}

func limitedNode(t *testing.T, b sim.Backend) limits {
	t.Helper()
	h := sim.New(sim.A100, sim.A100)
	return limits{gputest.NewSimulatedCgroups(t, b, func(change func(*sim.Node) error) (err error) {
		h.Update(func(n *sim.Node) { err = change(n) })
		return err
	}), h}
}

func (l limits) set(gpu, cgroup string, soft, hard uint64, root bool) sim.Return {
	return returned(l.Node(func(n *sim.Node) error { return n.SetMemoryLimit(gpu, cgroup, soft, hard, root) }))
}

func (l limits) Set(gpu, cgroup string, soft, hard uint64) sim.Return {
	return l.set(gpu, cgroup, soft, hard, true)
}

func (l limits) SetByUser(gpu, cgroup string, soft, hard uint64) sim.Return {
	return l.set(gpu, cgroup, soft, hard, false)
}

func (l limits) Get(gpu, cgroup string) (got sim.MemoryLimit, ret sim.Return) {
	err := l.Node(func(n *sim.Node) (err error) { got, err = n.MemoryLimit(gpu, cgroup); return err })
	return got, returned(err)
}

func (l limits) Disturb(how gputest.Disturbance) error {
	return l.Node(func(n *sim.Node) error {
		switch how {
		case gputest.LastClose:
			n.Forgets = true
			n.Forget()
			return nil
		case gputest.Reset:
			return n.Reset(0, n.GPUs[0].UUID)
		case gputest.Reload:
			n.Reload()
			return nil
		case gputest.DaemonReload:
		}
		return errors.ErrUnsupported
	})
}

func TestLimitsGoWithTheLastClose(t *testing.T) {
	g := NewWithT(t)
	l := limitedNode(t, sim.Dmem)
	gpu, pod := l.GPUs()[0], l.Cgroup(t, "", true)
	g.Expect(l.Set(gpu, pod, 0, 1<<30)).To(Equal(sim.Success))
	l.h.Update(func(n *sim.Node) { n.GPUs[0].Persistence = true })
	g.Expect(l.Disturb(gputest.LastClose)).To(Succeed())
	got, _ := l.Get(gpu, pod)
	g.Expect(got.Hard).To(BeEquivalentTo(1<<30), "persistence mode keeps them")
	l.h.Update(func(n *sim.Node) { n.GPUs[0].Persistence = false })
	g.Expect(l.Disturb(gputest.LastClose)).To(Succeed())
	got, _ = l.Get(gpu, pod)
	g.Expect(got.Hard).To(Equal(sim.NoLimit))
}

func TestANewCgroupInheritsAStaleLimitOfMisc(t *testing.T) {
	for backend, failed := range map[sim.Backend]string{sim.Dmem: "", sim.Misc: sim.ErrOutOfMemory.Error()} {
		g := NewWithT(t)
		l := limitedNode(t, backend)
		gpu, pod := l.GPUs()[0], l.Cgroup(t, "", true)
		g.Expect(l.Set(gpu, pod, 0, 1<<30)).To(Equal(sim.Success))
		l.Remove(t, pod)
		next := l.Cgroup(t, "", true)
		g.Expect(l.Node(func(n *sim.Node) error { return n.Inherit(next) })).To(Succeed())
		g.Expect(l.Program(t, gpu, next).Allocate(sim.DeviceMemory, 1<<30)).To(Equal(failed), string(backend))
	}
}

func TestANewerKernelAppliesALimitBelowUse(t *testing.T) {
	g := NewWithT(t)
	l := limitedNode(t, sim.Dmem)
	l.h.Update(func(n *sim.Node) { n.Cgroups.AppliesBelowUse = true })
	gpu, pod := l.GPUs()[0], l.Cgroup(t, "", true)
	p := l.Program(t, gpu, pod)
	g.Expect(p.Allocate(sim.DeviceMemory, 2<<30)).To(BeEmpty())
	g.Expect(l.Set(gpu, pod, 0, 1<<30)).To(Equal(sim.Success))
	got, _ := l.Get(gpu, pod)
	g.Expect(got.Hard).To(BeEquivalentTo(1 << 30))
	g.Expect(p.Allocate(sim.DeviceMemory, 1)).To(Equal(sim.ErrOutOfMemory.Error()))
}
