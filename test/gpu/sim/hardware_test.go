// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"errors"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/gputest"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestHardwareRecordsWhatChanges(t *testing.T) {
	g := NewWithT(t)
	h := sim.New(sim.A100)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	uuid := inv.Devices[0].UUID
	g.Expect(h.SetMIG(t.Context(), uuid, true)).To(Succeed())
	g.Expect(h.CreateInstance(t.Context(), uuid, "3g.20gb", gpu.Placement{Start: 4, Size: 4})).To(Succeed())
	g.Expect(h.DestroyInstance(t.Context(), uuid, 2)).To(Succeed())
	g.Expect(h.Writes()).To(Equal([]string{
		"SetMIG " + uuid + " true", "CreateInstance " + uuid + " 3g.20gb at 4:4", "DestroyInstance " + uuid + " 2",
	}))
}

func TestAFailedComputeInstanceTakesTheGPUInstanceBack(t *testing.T) {
	g := NewWithT(t)
	h := sim.New(sim.H100)
	inv, _ := h.Observe(t.Context())
	uuid := inv.Devices[0].UUID
	g.Expect(h.SetMIG(t.Context(), uuid, true)).To(Succeed())
	broken := errors.New("broken")
	h.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpCreateComputeInstance {
			return broken
		}
		return nil
	}
	g.Expect(h.CreateInstance(t.Context(), uuid, "1g.10gb", gpu.Placement{Start: 0, Size: 1})).To(MatchError(broken))
	inv, _ = h.Observe(t.Context())
	g.Expect(inv.Devices[0].State.Instances).To(BeEmpty())
}

func TestACrashLeavesAPartialInstance(t *testing.T) {
	g := NewWithT(t)
	h := sim.New(sim.H100)
	inv, _ := h.Observe(t.Context())
	uuid := inv.Devices[0].UUID
	g.Expect(h.SetMIG(t.Context(), uuid, true)).To(Succeed())
	h.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpCreateComputeInstance {
			return sim.ErrCrash
		}
		return nil
	}
	at := gpu.Placement{Start: 0, Size: 1}
	g.Expect(h.CreateInstance(t.Context(), uuid, "1g.10gb", at)).To(MatchError(sim.ErrCrash))
	inv, _ = h.Observe(t.Context())
	g.Expect(inv.Devices[0].State.Instances).To(Equal([]gpu.Instance{{Profile: "1g.10gb", Placement: at, ID: 7, Partial: true}}))
}

func TestContract(t *testing.T) {
	gputest.Contract(t, func(_ *testing.T, models ...string) gputest.Fixture {
		wanted := make([]sim.Model, 0, len(models))
		for _, m := range models {
			wanted = append(wanted, sim.Model(m))
		}
		h := sim.New(wanted...)
		return gputest.Fixture{Hardware: h, Rig: rig{t, h}}
	})
}

type rig struct {
	t *testing.T
	h *sim.Hardware
}

func (r rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r rig) gpu(uuid string, change func(g *sim.GPU)) {
	r.h.Update(func(n *sim.Node) {
		g, err := n.GPU(uuid)
		r.must(err)
		change(g)
	})
}

func (r rig) AddProcess(uuid string, p gpu.Process)  { r.must(r.h.AddProcess(uuid, p)) }
func (r rig) SetUse(uuid string, use gpu.ProcessUse) { r.must(r.h.SetUse(uuid, use)) }
func (r rig) RemoveProcess(pid int)                  { r.h.RemoveProcess(pid) }
func (r rig) Reboot()                                { r.h.Reboot() }

func (r rig) HoldOpen() (release func()) {
	const other = 900100
	r.h.Update(func(n *sim.Node) { n.Open(sim.Client{PID: other}) })
	return func() { r.h.Update(func(n *sim.Node) { n.Shut(other) }) }
}

func (r rig) HoldInstances() (release func()) {
	const dcgm = 900200
	r.h.Update(func(n *sim.Node) {
		held := sim.Client{PID: dcgm}
		for _, g := range n.GPUs {
			for _, i := range g.Instances {
				for _, c := range i.Compute {
					held.Instances = append(held.Instances, c.UUID)
				}
			}
		}
		n.Open(held)
	})
	return func() { r.h.Update(func(n *sim.Node) { n.Shut(dcgm) }) }
}

func (r rig) Switch() { r.h.Update(func(n *sim.Node) { n.NVSwitch = true }) }

func (r rig) SetPersistence(uuid string, on bool) {
	r.gpu(uuid, func(g *sim.GPU) { g.Persistence = on })
}

func (r rig) ForbidReset(uuid string) { r.gpu(uuid, func(g *sim.GPU) { g.NoReset = true }) }

func (r rig) TakeLicense(uuid string) { r.gpu(uuid, func(g *sim.GPU) { g.Unlicensed = true }) }

func (r rig) Persistence(uuid string) (on bool) {
	r.gpu(uuid, func(g *sim.GPU) { on = g.Persistence })
	return on
}

func (r rig) CreatePartial(uuid, profile string, at gpu.Placement, slices int) {
	r.h.Update(func(n *sim.Node) { r.must(n.CreatePartial(uuid, profile, at, slices)) })
}

func (r rig) FailComputeInstances() {
	failed := false
	r.h.Fail = func(op sim.Op, _ string) error {
		if op != sim.OpCreateComputeInstance || failed {
			return nil
		}
		failed = true
		return errors.New("broken")
	}
}
