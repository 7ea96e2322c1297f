// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"errors"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const self = 1

func node(t *testing.T, models ...sim.Model) (n *sim.Node, uuid string) {
	t.Helper()
	n, err := sim.NewNode("test", models...)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return n, n.GPUs[0].UUID
}

func returned(err error) sim.Return {
	if refusal, ok := errors.AsType[*sim.Error](err); ok {
		return refusal.Return
	}
	return sim.Success
}

func TestCatalogueHoldsEveryGPUWhosePlacementsAreKnown(t *testing.T) {
	g := NewWithT(t)
	g.Expect(sim.Models()).To(HaveLen(18))
	for _, m := range sim.Models() {
		s, err := sim.SpecOf(m)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(s.Product).NotTo(BeEmpty(), string(m))
		if m != sim.GB10 {
			g.Expect(s.MemoryMiB).To(BeNumerically(">", 10000), string(m))
		}
		g.Expect(s.MIGCapable()).To(Equal(len(s.Profiles) > 0), string(m))
		for _, p := range s.Profiles {
			g.Expect(p.MemoryMiB).To(BeNumerically(">", 0), "%s %s", m, p.Name)
			g.Expect(p.Starts).NotTo(BeEmpty(), "%s %s", m, p.Name)
			g.Expect(p.Starts[len(p.Starts)-1]+p.Size).To(BeNumerically("<=", s.MemorySlices), "%s %s", m, p.Name)
		}
	}
	_, err := sim.SpecOf("voodoo2")
	g.Expect(err).To(MatchError(ContainSubstring(`unknown GPU model "voodoo2": the models are [a100-40gb`)))
}

func TestEveryProfileCanBeCreatedAsOftenAsItSays(t *testing.T) {
	for _, m := range sim.Models() {
		t.Run(string(m), func(t *testing.T) {
			g := NewWithT(t)
			n, uuid := node(t, m)
			if !n.GPUs[0].Spec().MIGCapable() {
				t.Skip("no MIG")
			}
			_, err := n.SetMIG(uuid, true, self)
			g.Expect(err).NotTo(HaveOccurred())
			for _, p := range n.GPUs[0].Spec().Profiles {
				trial := n.Clone()
				g.Expect(trial.GPUs[0].RemainingCapacity(p)).To(Equal(p.Max), p.Name)
				ids := map[int]bool{}
				for range p.Max {
					i, err := trial.CreateGPUInstance(uuid, p.ID, nil)
					g.Expect(err).NotTo(HaveOccurred(), p.Name)
					ids[i.ID] = true
				}
				g.Expect(ids).To(HaveLen(p.Max), p.Name)
				_, err := trial.CreateGPUInstance(uuid, p.ID, nil)
				g.Expect(returned(err)).To(Equal(sim.InsufficientResources), p.Name)
			}
		})
	}
}

func TestCreatingInstances(t *testing.T) {
	type create struct {
		profile string
		start   int
		want    sim.Return
	}
	cases := map[string]struct {
		model sim.Model
		steps []create
	}{
		"4g and 3g fill an A100": {sim.A100, []create{
			{"4g.20gb", 0, sim.Success}, {"3g.20gb", 4, sim.Success}, {"1g.5gb", 6, sim.InsufficientResources},
		}},
		"two 3g leave one compute slice that nothing can use": {sim.A100, []create{
			{"3g.20gb", 0, sim.Success}, {"3g.20gb", 4, sim.Success}, {"1g.5gb", 3, sim.InsufficientResources},
		}},
		"placements do not overlap": {sim.A100, []create{
			{"1g.5gb", 4, sim.Success}, {"3g.20gb", 4, sim.InsufficientResources}, {"3g.20gb", 0, sim.Success},
		}},
		"a placement that the profile does not have": {sim.A100, []create{{"2g.10gb", 1, sim.InvalidArgument}}},
		"an eighth 1g has neither slot nor slice":    {sim.A100, []create{{"1g.5gb", 7, sim.InvalidArgument}}},
		"one instance has the media extensions": {sim.A100, []create{
			{"1g.5gb+me", 0, sim.Success}, {"1g.5gb+me", 1, sim.InsufficientResources}, {"1g.5gb", 1, sim.Success},
		}},
		"all media engines leave none to a sibling that needs some": {"rtx-pro-6000-blackwell-96gb", []create{
			{"1g.24gb+me.all", 0, sim.Success}, {"1g.24gb", 3, sim.InsufficientResources}, {"1g.24gb-me", 3, sim.Success},
		}},
		"whole A30 in quarters": {sim.A30, []create{
			{"2g.12gb", 0, sim.Success}, {"1g.6gb", 2, sim.Success}, {"1g.6gb", 3, sim.Success}, {"1g.6gb", 0, sim.InsufficientResources},
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			n, uuid := node(t, c.model)
			_, err := n.SetMIG(uuid, true, self)
			g.Expect(err).NotTo(HaveOccurred())
			for _, s := range c.steps {
				p := profile(t, n, s.profile)
				_, err := n.CreateGPUInstance(uuid, p.ID, &gpu.Placement{Start: s.start, Size: p.Size})
				g.Expect(returned(err)).To(Equal(s.want), "%s at %d: %v", s.profile, s.start, err)
			}
		})
	}
}

func profile(t *testing.T, n *sim.Node, name string) sim.Profile {
	t.Helper()
	for _, p := range n.GPUs[0].Spec().Profiles {
		if p.Name == name {
			return p
		}
	}
	t.Fatalf("no profile %s", name)
	return sim.Profile{}
}

// As seen in outputs of nvidia-smi mig -lgi.
func TestTheDriverChoosesThePlacementThatLeavesTheMostRoom(t *testing.T) {
	cases := map[string]struct {
		order []string
		want  map[gpu.Placement]int // instance id
	}{
		"3g, 2g, 1g, 1g": {
			[]string{"3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"},
			map[gpu.Placement]int{{Start: 4, Size: 4}: 2, {Start: 0, Size: 2}: 3, {Start: 2, Size: 1}: 9, {Start: 3, Size: 1}: 10},
		},
		"1g, 3g": {[]string{"1g.5gb", "3g.20gb"}, map[gpu.Placement]int{{Start: 6, Size: 1}: 13, {Start: 0, Size: 4}: 1}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			n, uuid := node(t, sim.A100)
			_, _ = n.SetMIG(uuid, true, self)
			for _, name := range c.order {
				_, err := n.CreateGPUInstance(uuid, profile(t, n, name).ID, nil)
				g.Expect(err).NotTo(HaveOccurred())
			}
			found := map[gpu.Placement]int{}
			for _, i := range n.GPUs[0].Instances {
				found[i.Placement] = i.ID
			}
			g.Expect(found).To(Equal(c.want))
		})
	}
}

func TestSettingTheMIGMode(t *testing.T) {
	busy := func(n *sim.Node) { _ = n.AddProcess(n.GPUs[0].UUID, gpu.Process{PID: 9, Instance: gpu.WholeGPU}) }
	cases := map[string]struct {
		model      sim.Model
		before     func(n *sim.Node)
		activation sim.Return
	}{
		"Ampere, idle":                                 {model: sim.A100},
		"Hopper, idle":                                 {model: sim.H100},
		"Ampere needs a reset: another client":         {sim.A100, func(n *sim.Node) { n.Open(sim.Client{PID: 7}) }, sim.InUse},
		"Ampere: the caller's own handle is no matter": {sim.A100, func(n *sim.Node) { n.Open(sim.Client{PID: self}) }, sim.Success},
		"Hopper does not mind clients":                 {sim.H100, func(n *sim.Node) { n.Open(sim.Client{PID: 7}) }, sim.Success},
		"Ampere, busy":                                 {sim.A100, busy, sim.InUse},
		"Hopper, busy":                                 {sim.H100, busy, sim.InUse},
		"Ampere in a virtual machine":                  {sim.A100, func(n *sim.Node) { n.GPUs[0].NoReset = true }, sim.ResetRequired},
		"no MIG":                                       {model: sim.T4, activation: sim.NotSupported},
		"a virtual GPU":                                {model: sim.VGPU, activation: sim.NotSupported},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			n, uuid := node(t, c.model)
			if c.before != nil {
				c.before(n)
			}
			activation, err := n.SetMIG(uuid, true, self)
			g.Expect(activation).To(Equal(c.activation))
			g.Expect(err != nil).To(Equal(c.activation == sim.NotSupported))
			g.Expect(n.GPUs[0].MIG).To(Equal(c.activation == sim.Success))
			g.Expect(n.GPUs[0].PendingMIG).To(Equal(c.activation != sim.NotSupported))
		})
	}
}

func TestPendingModeComesWithTheReset(t *testing.T) {
	g := NewWithT(t)
	n, uuid := node(t, sim.A100)
	n.Open(sim.Client{PID: 7})
	_, _ = n.SetMIG(uuid, true, self)
	g.Expect(returned(n.Reset(self, uuid))).To(Equal(sim.InUse))
	n.Shut(7)
	g.Expect(n.AddProcess(uuid, gpu.Process{PID: 9, Name: "python", Instance: gpu.WholeGPU})).To(Succeed())
	g.Expect(n.Reset(self, uuid)).To(MatchError("ERROR_IN_USE: process 9 (python) uses GPU 0000:07:00.0"))
	n.RemoveProcess(9)
	g.Expect(n.Reset(self, uuid)).To(Succeed())
	g.Expect(n.GPUs[0].MIG).To(BeTrue())
}

func TestWhatSurvivesAReboot(t *testing.T) {
	for model, survives := range map[sim.Model]bool{sim.A100: true, sim.A30: true, sim.H100: false, sim.B200: false} {
		t.Run(string(model), func(t *testing.T) {
			g := NewWithT(t)
			n, uuid := node(t, model, sim.T4)
			_, _ = n.SetMIG(uuid, true, self)
			_, err := n.CreateGPUInstance(uuid, n.GPUs[0].Spec().Profiles[0].ID, nil)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(n.SetComputeMode(n.GPUs[1].UUID, gpu.ComputeExclusiveProcess)).To(Succeed())
			n.Reboot()
			g.Expect(n.GPUs[0].MIG).To(Equal(survives))
			g.Expect(n.GPUs[0].PendingMIG).To(Equal(survives))
			g.Expect(n.GPUs[0].Instances).To(BeEmpty())
			g.Expect(n.GPUs[1].ComputeMode).To(Equal(gpu.ComputeDefault))
			g.Expect(n.Boot).To(Equal(2))
		})
	}
}

func TestDestroyingWhatIsUsed(t *testing.T) {
	g := NewWithT(t)
	n, uuid := node(t, sim.A100)
	_, _ = n.SetMIG(uuid, true, self)
	i, err := n.CreateGPUInstance(uuid, 9, nil)
	g.Expect(err).NotTo(HaveOccurred())
	c, err := n.CreateComputeInstance(uuid, i.ID, 3)
	g.Expect(err).NotTo(HaveOccurred())
	first := c.UUID
	g.Expect(n.DestroyGPUInstance(uuid, i.ID)).To(MatchError("ERROR_IN_USE: GPU instance 2 has compute instances"))
	g.Expect(n.AddProcess(uuid, gpu.Process{PID: 9, Name: "python", Instance: i.ID})).To(Succeed())
	g.Expect(n.DestroyComputeInstance(uuid, i.ID, c.ID)).To(MatchError(gpu.ErrBusy))
	n.RemoveProcess(9)
	g.Expect(n.DestroyComputeInstance(uuid, i.ID, c.ID)).To(Succeed())
	c, err = n.CreateComputeInstance(uuid, i.ID, 3)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(c.UUID).NotTo(Equal(first), "a new compute instance is a new MIG device")
}

func TestComputeModeIsFixedInMIGMode(t *testing.T) {
	g := NewWithT(t)
	n, uuid := node(t, sim.H100)
	g.Expect(n.SetComputeMode(uuid, gpu.ComputeExclusiveProcess)).To(Succeed())
	_, _ = n.SetMIG(uuid, true, self)
	g.Expect(n.GPUs[0].ComputeMode).To(Equal(gpu.ComputeDefault))
	g.Expect(n.SetComputeMode(uuid, gpu.ComputeExclusiveProcess)).To(MatchError(gpu.ErrNotSupported))
}

func TestUUIDsDifferBetweenNodes(t *testing.T) {
	g := NewWithT(t)
	a, _ := sim.NewNode("a", sim.A100, sim.A100)
	b, _ := sim.NewNode("b", sim.A100, sim.A100)
	g.Expect([]string{a.GPUs[0].UUID, a.GPUs[1].UUID, b.GPUs[0].UUID, b.GPUs[1].UUID}).To(HaveEach(MatchRegexp("^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")))
	g.Expect(map[string]bool{a.GPUs[0].UUID: true, a.GPUs[1].UUID: true, b.GPUs[0].UUID: true, b.GPUs[1].UUID: true}).To(HaveLen(4))
	again, _ := sim.NewNode("a", sim.A100)
	g.Expect(again.GPUs[0].UUID).To(Equal(a.GPUs[0].UUID))
}
