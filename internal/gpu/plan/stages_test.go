// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

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
