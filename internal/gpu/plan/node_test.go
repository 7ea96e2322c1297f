// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"errors"
	"fmt"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// steps are the texts of a plan.
func steps(t *testing.T, desired []v1alpha1.DeviceSpec, have []gpu.Device) []string {
	t.Helper()
	list, err := plan.Node(desired, have)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	texts := make([]string, 0, len(list))
	for _, s := range list {
		texts = append(texts, s.String())
	}
	return texts
}

func TestNodeRefuses(t *testing.T) {
	cases := map[string]struct {
		model           sim.Model
		uuid            string // of another GPU
		desired         v1alpha1.DeviceSharing
		reason, message string
	}{
		"a GPU that is not there": {
			model: sim.T4, uuid: "GPU-gone", desired: whole(), reason: v1alpha1.ReasonUnknownDevice,
		},
		"MIG mode on a GPU without": {
			model: sim.T4, desired: split(count("1g.5gb", 1)), reason: v1alpha1.ReasonMIGNotSupported,
		},
		"a profile of another GPU": {
			model: sim.A30, desired: split(count("1g.5gb", 1)), reason: v1alpha1.ReasonProfileNotAvailable,
		},
		"what does not fit": {
			model: sim.A30, desired: split(count("1g.6gb", 5)), reason: v1alpha1.ReasonLayoutDoesNotFit,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			have := observed(t, c.model)
			spec := v1alpha1.DeviceSpec{UUID: have[0].UUID, Sharing: c.desired}
			if c.uuid != "" {
				spec.UUID = c.uuid
				c.message = fmt.Sprintf("the node has no GPU %s (any more); it has %s; the controller plans anew once the node "+
					"reports its GPUs", c.uuid, have[0].UUID)
			}
			_, err := plan.Node([]v1alpha1.DeviceSpec{spec}, have)
			isProblem(t, err, c.reason, c.message)
		})
	}
}

func TestGPUsThatTheDesiredStateDoesNotListStayAsTheyAre(t *testing.T) {
	g := NewWithT(t)
	four := served(plan.ResourceGPU, 25, 3840)
	w := newWorld(sim.T4, sim.T4)
	g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{four, four}))).To(Succeed())
	have := w.devices(t)
	g.Expect(steps(t, nil, have)).To(BeEmpty())

	desired := []v1alpha1.DeviceSpec{{UUID: have[1].UUID, Sharing: whole()}}
	g.Expect(steps(t, desired, have)).To(Equal([]string{
		"GPU 0 (Tesla-T4) and GPU 1 (Tesla-T4): stop MPS for nvidia.com/gpu",
		"GPU 1 (Tesla-T4): set compute mode DEFAULT",
		"GPU 0 (Tesla-T4): start MPS for nvidia.com/gpu, each client 25% of the threads and 3840 MiB",
	}), "the other GPU gets its daemon back")
	g.Expect(w.settle(t, desired)).To(Succeed())
	g.Expect(plan.Observed(w.devices(t)[0])).To(Equal(four))

	desired[0].Sharing = served(plan.ResourceGPU, 50, 1000)
	g.Expect(w.settle(t, desired)).To(Succeed())
	g.Expect(plan.Observed(w.devices(t)[0])).To(Equal(served(plan.ResourceGPU, 50, 3840)), "a daemon has one percentage")
}

func TestWhatIsOddAboutAGPUThatTheDesiredStateDoesNotListStays(t *testing.T) {
	for name, change := range found() {
		w := newWorld(sim.A100, sim.A100, sim.T4)
		w.Update(change)
		NewWithT(t).Expect(steps(t, nil, w.devices(t))).To(BeEmpty(), name)
	}
}

func TestAnExternalDaemonIsWaitedFor(t *testing.T) {
	nvidia := func(w *world) {
		w.Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].ComputeMode = gpu.ComputeExclusiveProcess
			}
		})
		w.foreign["nvidia.com/gpu"] = plan.Daemon{
			Resource: "nvidia.com/gpu", ActiveThreadPercentage: 25,
			Devices: []plan.DaemonDevice{{UUID: w.devices(t)[0].UUID, PinnedMemoryLimitMiB: 3840}},
		}
	}
	byNVIDIA := served(plan.ResourceGPU, 25, 3840)
	byNVIDIA.MPS.Owner = v1alpha1.MPSDaemonOwnerNVIDIA
	ours := served(plan.ResourceGPU, 25, 3840)

	cases := map[string]struct {
		running bool
		desired v1alpha1.DeviceSharing
		met     bool
	}{
		"that is desired, and runs":                                  {running: true, desired: byNVIDIA, met: true},
		"that is desired, before it runs":                            {desired: byNVIDIA},
		"before the GPU is whole":                                    {running: true, desired: whole()},
		"before the GPU is split":                                    {running: true, desired: split(count("7g.40gb", 1))},
		"before ours takes its place":                                {running: true, desired: ours},
		"before ours serves a GPU of the same resource, another one": {running: true, desired: ours},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w := newWorld(sim.A100, sim.A100)
			if c.running {
				nvidia(w)
			}
			have := w.devices(t)
			index := 0
			if name == "before ours serves a GPU of the same resource, another one" {
				index = 1
			}
			desired := []v1alpha1.DeviceSpec{{UUID: have[index].UUID, Sharing: c.desired}}
			g.Expect(steps(t, desired, have)).To(BeEmpty())
			g.Expect(plan.Same(plan.Observed(have[index]), c.desired)).To(Equal(c.met))
			clear(w.foreign)
			if c.desired.MPS == nil || c.desired.MPS.Owner == v1alpha1.MPSDaemonOwnerGPUSharing {
				g.Expect(w.settle(t, desired)).To(Succeed(), "once it is gone")
			}
		})
	}

	t.Run("ours makes room for it, and leaves it the compute mode", func(t *testing.T) {
		g := NewWithT(t)
		w := newWorld(sim.T4)
		g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{ours}))).To(Succeed())
		g.Expect(steps(t, specs(t, w, []v1alpha1.DeviceSharing{byNVIDIA}), w.devices(t))).To(Equal([]string{
			"GPU 0 (Tesla-T4): stop MPS for nvidia.com/gpu",
		}))
	})
	t.Run("MIG makes room for it", func(t *testing.T) {
		g := NewWithT(t)
		w := newWorld(sim.A100)
		g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{split(count("7g.40gb", 1))}))).To(Succeed())
		g.Expect(steps(t, specs(t, w, []v1alpha1.DeviceSharing{byNVIDIA}), w.devices(t))).To(Equal([]string{
			"GPU 0 (NVIDIA-A100-SXM4-40GB): destroy 7g.40gb at 0:8", "GPU 0 (NVIDIA-A100-SXM4-40GB): disable MIG mode",
		}))
	})
}

func TestAGPUThatCannotBeResetWaitsForAReboot(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.A100)
	w.Update(func(n *sim.Node) { n.GPUs[0].NoReset = true })
	desired := specs(t, w, []v1alpha1.DeviceSharing{split(count("1g.5gb", 7))})
	for range 2 { // asked for, and found pending
		_, err := w.reconcile(t, desired, all)
		g.Expect(err).To(MatchError(gpu.ErrNotSupported))
		g.Expect(err).To(MatchError(gpu.ErrResetRequired))
		g.Expect(err).To(MatchError(HavePrefix("GPU 0 (NVIDIA-A100-SXM4-40GB): setting MIG mode to enabled: ")))
	}
	w.Reboot()
	g.Expect(w.settle(t, desired)).To(Succeed())
}

func TestTheComputeModeOfAVirtualGPUIsItsHosts(t *testing.T) {
	w := newWorld(sim.VGPU)
	w.Update(func(n *sim.Node) { n.GPUs[0].ComputeMode = gpu.ComputeProhibited })
	NewWithT(t).Expect(steps(t, specs(t, w, []v1alpha1.DeviceSharing{whole()}), w.devices(t))).To(BeEmpty())
}

func TestAPendingModeIsTakenBackBesideWhatRuns(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.A100)
	desired := specs(t, w, []v1alpha1.DeviceSharing{split(count("1g.5gb", 2))})
	g.Expect(w.settle(t, desired)).To(Succeed())
	w.Update(func(n *sim.Node) { n.GPUs[0].PendingMIG = false })
	process("python", 0, 5)(w)
	g.Expect(w.settle(t, desired)).To(Succeed())
}

// TestADriverThatListsProfilesInMIGModeOnly is R535: the instances come with the plan after the mode.
func TestADriverThatListsProfilesInMIGModeOnly(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.H100)
	desired := specs(t, w, []v1alpha1.DeviceSharing{split(count("1g.10gb", 7))})
	have := w.devices(t)
	have[0].Profiles = nil
	g.Expect(steps(t, desired, have)).To(Equal([]string{"GPU 0 (NVIDIA-H100-80GB-HBM3): enable MIG mode"}))
	have[0].State.MIG, have[0].PendingMIG = true, true
	_, err := plan.Node(desired, have)
	isProblem(t, err, v1alpha1.ReasonProfileNotAvailable, "")
}

func TestThereIsOnePlanForOneState(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.A100, sim.A100, sim.T4)
	to := states("1g.5gb", "2g.10gb", "3g.20gb")[9]
	desired, have := to.specs(t, w), w.devices(t)
	first := steps(t, desired, have)
	g.Expect(first).NotTo(BeEmpty())
	have[0], have[2] = have[2], have[0]
	desired[0], desired[1] = desired[1], desired[0]
	g.Expect(steps(t, desired, have)).To(Equal(first))
}

func TestADestroyedInstanceThatIsGoneIsNoError(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.A100)
	g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{split(count("7g.40gb", 1))}))).To(Succeed())
	list, err := plan.Node(specs(t, w, []v1alpha1.DeviceSharing{split()}), w.devices(t))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(list).To(HaveLen(1))
	for range 2 {
		g.Expect(list[0].Do(t.Context(), w.tools())).To(Succeed())
	}
}

func TestGPUsOfAStep(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.T4, sim.T4)
	four := served(plan.ResourceGPU, 25, 3840)
	list, err := plan.Node(specs(t, w, []v1alpha1.DeviceSharing{four, four}), w.devices(t))
	g.Expect(err).NotTo(HaveOccurred())
	have := w.devices(t)
	both := []string{have[0].UUID, have[1].UUID}
	g.Expect(list).To(HaveLen(3))
	g.Expect(plan.GPUs(list[1])).To(Equal(both[1:]))
	g.Expect(list[1].Device()).To(Equal(both[1]))
	g.Expect(plan.GPUs(list[2])).To(Equal(both))
	g.Expect(list[2].Device()).To(BeEmpty())
	g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{four, four}))).To(Succeed())
	list, err = plan.Node(specs(t, w, []v1alpha1.DeviceSharing{whole(), whole()}), w.devices(t))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(plan.GPUs(list[0])).To(Equal(both))
	g.Expect(list[0].Device()).To(BeEmpty())
}

func TestStepsNameTheirGPUAndWhatFailed(t *testing.T) {
	w := newWorld(sim.A100, sim.T4)
	four := served(plan.ResourceGPU, 25, 3840)
	both := []v1alpha1.DeviceSharing{split(count("7g.40gb", 1)), four}
	NewWithT(t).Expect(w.settle(t, specs(t, w, both))).To(Succeed())
	w.fail = func(int) error { return errInjected }
	want := []string{
		"GPU 1 (Tesla-T4): stopping MPS for nvidia.com/gpu: injected",
		"GPU 0 (NVIDIA-A100-SXM4-40GB): destroying 7g.40gb at 0:8: injected",
		"GPU 0 (NVIDIA-A100-SXM4-40GB): creating 3g.20gb at 4:4: injected",
		"GPU 1 (Tesla-T4): setting compute mode DEFAULT: injected",
	}
	list, err := plan.Node(specs(t, w, []v1alpha1.DeviceSharing{split(count("3g.20gb", 1)), whole()}), w.devices(t))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(list).To(HaveLen(len(want)))
	uuids := map[string]bool{w.devices(t)[0].UUID: true, w.devices(t)[1].UUID: true}
	for i, s := range list {
		NewWithT(t).Expect(s.Do(t.Context(), w.tools())).To(MatchError(want[i]))
		NewWithT(t).Expect(uuids).To(HaveKey(s.Device()))
	}
}

func TestBlockers(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.A100, sim.A100)
	g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{split(count("1g.5gb", 2)), whole()}))).To(Succeed())
	holder("b", 0, 5)(w)
	process("python", 0, 5)(w)
	holder("a", 0, 4)(w)
	client("c", 1)(w)
	have := w.devices(t)
	list, err := plan.Node(specs(t, w, []v1alpha1.DeviceSharing{whole(), split()}), have)
	g.Expect(err).NotTo(HaveOccurred())

	got := map[string][]string{}
	for _, s := range list {
		var in []string
		for _, b := range plan.Blockers(s, have) {
			in = append(in, blocker(b))
		}
		got[s.String()] = in
	}
	first, second := instanceID(t, w, 4), instanceID(t, w, 5)
	g.Expect(got).To(Equal(map[string][]string{
		"GPU 0 (NVIDIA-A100-SXM4-40GB): destroy 1g.5gb at 4:1": {
			fmt.Sprintf("container main of pod research/a, instance %d", first),
		},
		"GPU 0 (NVIDIA-A100-SXM4-40GB): destroy 1g.5gb at 5:1": {
			fmt.Sprintf("process 4242 (python), instance %d", second), fmt.Sprintf("container main of pod research/b, instance %d", second),
		},
		"GPU 0 (NVIDIA-A100-SXM4-40GB): disable MIG mode": {
			fmt.Sprintf("container main of pod research/a, instance %d", first),
			fmt.Sprintf("process 4242 (python), instance %d", second), fmt.Sprintf("container main of pod research/b, instance %d", second),
		},
		"GPU 1 (NVIDIA-A100-SXM4-40GB): enable MIG mode": {
			"process 4711 (python), instance -1", "container main of pod research/c, instance -1",
		},
	}), "an MPS server blocks nothing")
}

func instanceID(t *testing.T, w *world, start int) int {
	t.Helper()
	for _, i := range w.devices(t)[0].State.Instances {
		if i.Placement.Start == start {
			return i.ID
		}
	}
	t.Fatalf("no instance at %d", start)
	return 0
}

func TestObserved(t *testing.T) {
	at := func(start int) gpu.Placement { return gpu.Placement{Start: start, Size: 1} }
	nvidia := served(plan.ResourceGPUShared, 100, 15360)
	nvidia.MPS.Owner = v1alpha1.MPSDaemonOwnerNVIDIA
	cases := map[string]struct {
		state gpu.State
		want  v1alpha1.DeviceSharing
	}{
		"a whole GPU":                {gpu.State{}, whole()},
		"MIG mode without instances": {gpu.State{MIG: true}, split()},
		"instances by profile, orphans not": {
			gpu.State{MIG: true, Instances: []gpu.Instance{
				{Profile: "2g.10gb", Placement: at(0)},
				{Profile: "1g.5gb", Placement: at(2)},
				{Profile: "1g.5gb", Placement: at(3)},
				{Profile: "1g.5gb", Placement: at(4), Partial: true},
			}},
			split(count("1g.5gb", 2), count("2g.10gb", 1)),
		},
		"our daemon": {
			gpu.State{MPS: &gpu.MPSDaemon{Resource: plan.ResourceGPU, ActiveThreadPercentage: 10, PinnedMemoryLimitMiB: 1000}},
			served(plan.ResourceGPU, 10, 1000),
		},
		"NVIDIA's daemon, without limits": {
			gpu.State{MPS: &gpu.MPSDaemon{Resource: plan.ResourceGPUShared, External: true}}, nvidia,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got := plan.Observed(gpu.Device{MemoryMiB: 15360, State: c.state})
			NewWithT(t).Expect(got).To(Equal(c.want))
			NewWithT(t).Expect(plan.Same(got, c.want)).To(BeTrue())
		})
	}
}

func TestSame(t *testing.T) {
	nvidia := func(percentage int32) v1alpha1.DeviceSharing {
		s := served(plan.ResourceGPU, percentage, 1000)
		s.MPS.Owner = v1alpha1.MPSDaemonOwnerNVIDIA
		return s
	}
	ours := served(plan.ResourceGPU, 10, 1000)
	cases := map[string]struct {
		a, b v1alpha1.DeviceSharing
		want bool
	}{
		"the same instances in another order": {split(count("a", 1), count("b", 2)), split(count("b", 2), count("a", 1)), true},
		"another number of instances":         {split(count("a", 1)), split(count("a", 2)), false},
		"another profile":                     {split(count("a", 1)), split(count("b", 1)), false},
		"MIG mode or not":                     {split(), whole(), false},
		"the same daemon":                     {ours, served(plan.ResourceGPU, 10, 1000), true},
		"other limits":                        {ours, served(plan.ResourceGPU, 10, 999), false},
		"other threads":                       {ours, served(plan.ResourceGPU, 11, 1000), false},
		"another resource":                    {ours, served(plan.ResourceGPUShared, 10, 1000), false},
		"a daemon or none":                    {ours, whole(), false},
		"another owner":                       {ours, nvidia(10), false},
		"NVIDIA's daemon with other limits":   {nvidia(10), nvidia(20), true},
	}
	for name, c := range cases {
		NewWithT(t).Expect(plan.Same(c.a, c.b)).To(Equal(c.want), name)
		NewWithT(t).Expect(plan.Same(c.b, c.a)).To(Equal(c.want), name)
	}
}

func TestAProblemIsAnError(t *testing.T) {
	var err error = &plan.Problem{Reason: v1alpha1.ReasonMPSClientLimitExceeded, Message: "too many"}
	var p *plan.Problem
	NewWithT(t).Expect(errors.As(fmt.Errorf("resolving: %w", err), &p)).To(BeTrue())
	NewWithT(t).Expect(err).To(MatchError("too many"))
}
