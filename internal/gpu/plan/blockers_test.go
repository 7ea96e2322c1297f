// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// A driver whose lists of processes are wrong does not tell whether a GPU is idle.
func TestGPUsOfUnknownProcessesAreNotDisturbed(t *testing.T) {
	disruptive := map[string]v1alpha1.DeviceSharing{
		"MIG": split(count("1g.5gb", 1)), "MPS": served(plan.ResourceGPU, 25, 3840),
	}
	for name, desired := range disruptive {
		t.Run(name, func(t *testing.T) {
			have := observed(t, sim.A100)
			have[0].ProcessesUnknown = true
			steps, err := plan.Node([]v1alpha1.DeviceSpec{{UUID: have[0].UUID, Sharing: desired}}, have)
			isProblem(t, err, v1alpha1.ReasonProcessesUnknown, "GPU 0 (NVIDIA-A100-SXM4-40GB): the driver does not report which "+
				"processes use the GPU, so that changing it could end them; update the driver (versions 535.43.02 to 535.86.05 "+
				"have this defect, and a version in another form may)")
			NewWithT(t).Expect(steps).To(BeEmpty())
		})
	}
	t.Run("what is so stays so", func(t *testing.T) {
		g := NewWithT(t)
		have := observed(t, sim.A100)
		have[0].ProcessesUnknown = true
		g.Expect(plan.Node([]v1alpha1.DeviceSpec{{UUID: have[0].UUID, Sharing: whole()}}, have)).To(BeEmpty())
	})
}

// GPUs that cannot be left out of a reset must be idle for it.
func TestAResetNeedsItsPeersIdle(t *testing.T) {
	g := NewWithT(t)
	have := observed(t, sim.A100, sim.A100, sim.A100)
	have[0].ResetPeers = []string{have[2].UUID}
	for i := range have {
		have[i].Holders = []gpu.Holder{{Namespace: "ml", Pod: "train", Container: "main", Instance: gpu.WholeGPU}}
	}
	steps, err := plan.Node([]v1alpha1.DeviceSpec{{UUID: have[0].UUID, Sharing: split(count("1g.5gb", 1))}}, have)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(plan.GPUs(steps[0])).To(Equal([]string{have[0].UUID, have[2].UUID}))
	blocked := make([]string, 0, 2)
	for _, b := range plan.Blockers(steps[0], have) {
		blocked = append(blocked, b.UUID)
	}
	g.Expect(blocked).To(Equal([]string{have[0].UUID, have[2].UUID}))
}

// An MPS server holds its GPU, also where another GPU changes.
func TestMPSOnAPeerStopsForAReset(t *testing.T) {
	g := NewWithT(t)
	have := observed(t, sim.A100, sim.A100, sim.A100)
	have[0].ResetPeers = []string{have[2].UUID}
	for i := 1; i < 3; i++ {
		have[i].State.MPS = &gpu.MPSDaemon{Resource: plan.ResourceGPU, ActiveThreadPercentage: 25, PinnedMemoryLimitMiB: 3840}
		have[i].State.ComputeMode = gpu.ComputeExclusiveProcess
	}
	desired := []v1alpha1.DeviceSpec{{UUID: have[0].UUID, Sharing: split(count("1g.5gb", 1))}}
	steps, err := plan.Node(desired, have)
	g.Expect(err).NotTo(HaveOccurred())
	const both = "GPU 1 (NVIDIA-A100-SXM4-40GB) and GPU 2 (NVIDIA-A100-SXM4-40GB): "
	g.Expect(steps[0].String()).To(Equal(both + "stop MPS for nvidia.com/gpu"))
	g.Expect(steps[len(steps)-1].String()).To(HavePrefix(both + "start MPS for nvidia.com/gpu"))

	have[0].ResetPeers = nil
	steps, err = plan.Node(desired, have)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(steps[0].String()).To(ContainSubstring("enable MIG mode"), "without a peer it is left alone")
}

func TestUnusedSlices(t *testing.T) {
	for name, test := range map[string]struct {
		model     sim.Model
		instances []v1alpha1.InstanceCount
		want      plan.Slices
	}{
		"nothing created":              {sim.A100, nil, plan.Slices{Compute: 7, Memory: 8}},
		"seven of the smallest":        {sim.A100, counts("1g.5gb", 7), plan.Slices{Memory: 1}},
		"two halves":                   {sim.A100, counts("3g.20gb", 2), plan.Slices{Compute: 1}},
		"the layout of the CERN slide": {sim.A100, counts("3g.20gb", 1, "2g.10gb", 2), plan.Slices{}},
		"the whole GPU":                {sim.A100, counts("7g.40gb", 1), plan.Slices{}},
		"three of 2g":                  {sim.A100, counts("2g.10gb", 3), plan.Slices{Compute: 1, Memory: 2}},
		"with media engines":           {sim.A100, counts("1g.5gb+me", 1), plan.Slices{Compute: 6, Memory: 7}},
		"one of four":                  {sim.A30, counts("1g.6gb", 3), plan.Slices{Compute: 1, Memory: 1}},
		"no MIG":                       {sim.T4, nil, plan.Slices{}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			d := deviceOf(t, test.model)
			var instances []gpu.Instance
			if len(test.instances) > 0 {
				state, err := plan.Want(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: test.instances}, d)
				g.Expect(err).NotTo(HaveOccurred())
				instances = state.Instances
			}
			g.Expect(plan.Unused(d, instances)).To(Equal(test.want))
		})
	}
}

// deviceOf is a simulated GPU as it is found.
func deviceOf(t *testing.T, model sim.Model) gpu.Device {
	t.Helper()
	n, err := sim.NewNode("a", model)
	if err != nil {
		t.Fatal(err)
	}
	inventory, err := sim.On(n).Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return inventory.Devices[0]
}

// counts lists profiles, each with its number.
func counts(pairs ...any) []v1alpha1.InstanceCount {
	var all []v1alpha1.InstanceCount
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, v1alpha1.InstanceCount{Profile: pairs[i].(string), Count: int32(pairs[i+1].(int))})
	}
	return all
}

func stages(steps []plan.Step) [][][]string {
	var said [][][]string
	for _, stage := range plan.Stages(steps) {
		var lanes [][]string
		for _, lane := range stage {
			var list []string
			for _, s := range lane {
				list = append(list, s.String())
			}
			lanes = append(lanes, list)
		}
		said = append(said, lanes)
	}
	return said
}

func TestStages(t *testing.T) {
	four := served(plan.ResourceGPU, 25, 3840)
	cases := map[string]struct {
		from, to []v1alpha1.DeviceSharing
		want     [][][]string
	}{
		"nothing to do": {},
		"instances only: no GPU waits for another": {
			from: []v1alpha1.DeviceSharing{split(count("7g.40gb", 1)), split(count("7g.40gb", 1))},
			to:   []v1alpha1.DeviceSharing{split(count("4g.20gb", 1)), split(count("3g.20gb", 1))},
			want: [][][]string{{
				{"GPU 0 (NVIDIA-A100-SXM4-40GB): destroy 7g.40gb at 0:8", "GPU 0 (NVIDIA-A100-SXM4-40GB): create 4g.20gb at 0:4"},
				{"GPU 1 (NVIDIA-A100-SXM4-40GB): destroy 7g.40gb at 0:8", "GPU 1 (NVIDIA-A100-SXM4-40GB): create 3g.20gb at 4:4"},
			}},
		},
		"changes of mode together, after what is lost and before what is got; MPS first and last": {
			from: []v1alpha1.DeviceSharing{split(count("7g.40gb", 1)), four},
			to:   []v1alpha1.DeviceSharing{four, split(count("4g.20gb", 1))},
			want: [][][]string{
				{{"GPU 1 (NVIDIA-A100-SXM4-40GB): stop MPS for nvidia.com/gpu"}},
				{{"GPU 0 (NVIDIA-A100-SXM4-40GB): destroy 7g.40gb at 0:8"}},
				{{"GPU 0 (NVIDIA-A100-SXM4-40GB): disable MIG mode"}, {"GPU 1 (NVIDIA-A100-SXM4-40GB): enable MIG mode"}},
				{
					{"GPU 0 (NVIDIA-A100-SXM4-40GB): set compute mode EXCLUSIVE_PROCESS"},
					{"GPU 1 (NVIDIA-A100-SXM4-40GB): create 4g.20gb at 0:4"},
				},
				{{"GPU 0 (NVIDIA-A100-SXM4-40GB): start MPS for nvidia.com/gpu, each client 25% of the threads and 3840 MiB"}},
			},
		},
		"a time slice before the MIG mode that hides it": {
			from: []v1alpha1.DeviceSharing{timed(whole(), v1alpha1.TimeSliceIntervalShort)},
			to:   []v1alpha1.DeviceSharing{timed(split(), v1alpha1.TimeSliceIntervalLong)},
			want: [][][]string{
				{{"GPU 0 (NVIDIA-A100-SXM4-40GB): set time-slice interval Long"}},
				{{"GPU 0 (NVIDIA-A100-SXM4-40GB): enable MIG mode"}},
			},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w := newWorld(sim.A100, sim.A100)
			g.Expect(w.settle(t, specs(t, w, c.from))).To(Succeed())
			steps, err := plan.Node(specs(t, w, c.to), w.devices(t))
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(stages(steps)).To(Equal(c.want))
		})
	}
}

func TestAGPUThatCannotBeAsDesiredDoesNotKeepTheOthers(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.A100, sim.A100, sim.A100)
	have := w.devices(t)
	desired := specs(t, w, []v1alpha1.DeviceSharing{split(count("7g.40gb", 2)), split(count("1g.5gb", 7)), split(count("9g.90gb", 1))})
	steps, err := plan.Node(desired, have)
	isProblem(t, err, v1alpha1.ReasonLayoutDoesNotFit, "")
	g.Expect(err).To(MatchError(And(ContainSubstring("GPU 0"), ContainSubstring("; GPU 2"), Not(ContainSubstring("GPU 1")))))
	g.Expect(steps).To(HaveLen(8))
	for _, s := range steps {
		g.Expect(s.Device()).To(Equal(have[1].UUID))
	}
}

func TestBackPutsInstancesWhereTheyWere(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.A100, sim.T4)
	four := served(plan.ResourceGPU, 25, 3840)
	g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{split(count("2g.10gb", 2)), four}))).To(Succeed())
	g.Expect(w.Hardware.DestroyInstance(t.Context(), w.devices(t)[0].UUID, w.devices(t)[0].State.Instances[0].ID)).To(Succeed())
	before := w.devices(t)
	g.Expect(plan.Back(before, before)).To(BeEmpty())
	g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{split(count("1g.5gb", 7)), whole()}))).To(Succeed())

	for _, s := range plan.Back(before, w.devices(t)) {
		g.Expect(s.Do(t.Context(), w.tools())).To(Succeed(), s.String())
	}
	after := w.devices(t)
	g.Expect(after[0].State.Instances).To(HaveLen(1))
	g.Expect(after[0].State.Instances[0].Placement).To(Equal(before[0].State.Instances[0].Placement))
	g.Expect(after[1].State).To(Equal(before[1].State))
}

func TestBackRemovesWhatIsHalf(t *testing.T) {
	g := NewWithT(t)
	w := newWorld(sim.A100)
	g.Expect(w.settle(t, specs(t, w, []v1alpha1.DeviceSharing{split()}))).To(Succeed())
	before := w.devices(t)
	w.Update(func(n *sim.Node) {
		g.Expect(n.CreatePartial(n.GPUs[0].UUID, "1g.5gb", gpu.Placement{Start: 2, Size: 1}, 0)).To(Succeed())
	})
	g.Expect(stages(plan.Back(before, w.devices(t)))).To(Equal([][][]string{{{"GPU 0 (NVIDIA-A100-SXM4-40GB): destroy 1g.5gb at 2:1"}}}))
}

func TestAGPUWithUnknownMemoryIsSharedWithoutAMemoryLimit(t *testing.T) {
	g := NewWithT(t)
	gb10 := gpu.Device{UUID: "GPU-a", Product: "NVIDIA GB10", ComputeCapability: gpu.ComputeCapability{Major: 12, Minor: 1}}
	devices, err := plan.Resolve(mps(v1alpha1.MPS{Replicas: 4}), []gpu.Device{gb10})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(devices[0].Sharing.MPS.PinnedMemoryLimit).To(BeNil())
	steps, err := plan.Node(devices, []gpu.Device{gb10})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(steps[1].String()).To(HaveSuffix("start MPS for nvidia.com/gpu, each client 25% of the threads and no memory limit"))

	gb10.State = gpu.State{
		ComputeMode: gpu.ComputeExclusiveProcess, MPS: &gpu.MPSDaemon{Resource: plan.ResourceGPU, ActiveThreadPercentage: 25},
	}
	g.Expect(plan.Same(plan.Observed(gb10), devices[0].Sharing)).To(BeTrue())
	g.Expect(plan.Node(devices, []gpu.Device{gb10})).To(BeEmpty())

	devices, err = plan.Resolve(mps(v1alpha1.MPS{Replicas: 4, PinnedMemoryLimit: new(resource.MustParse("4Gi"))}), []gpu.Device{gb10})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(devices[0].Sharing.MPS.PinnedMemoryLimit.String()).To(Equal("4Gi"), "one that the policy names is set")
}

func TestOneServerForAllUsersNeedsVolta(t *testing.T) {
	g := NewWithT(t)
	d := gpu.Device{UUID: "GPU-a", Product: "Tesla P100", MemoryMiB: 16384, ComputeCapability: gpu.ComputeCapability{Major: 6}}
	_, err := plan.Resolve(mps(v1alpha1.MPS{Replicas: 2, MultiUser: new(true)}), []gpu.Device{d})
	g.Expect(err).To(MatchError(&plan.Problem{Reason: v1alpha1.ReasonMPSMultiUserNotSupported, Message: "GPU 0 (Tesla-P100) has compute capability " +
		"6.0, and sharing.mps.multiUser needs 7.0 (Volta) or newer; remove multiUser, or leave the GPU's node out of the policy"}))
	d.ComputeCapability.Major = 7
	devices, err := plan.Resolve(mps(v1alpha1.MPS{Replicas: 2, MultiUser: new(true)}), []gpu.Device{d})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(devices[0].Sharing.MPS.MultiUser).To(BeTrue())
}
