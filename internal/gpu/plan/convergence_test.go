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

// state is a desired state for a node of two MIG capable GPUs and one without MIG, and what the test calls it.
type state struct {
	name    string
	desired [3]v1alpha1.DeviceSharing
}

func whole() v1alpha1.DeviceSharing {
	return v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}
}

func timed(s v1alpha1.DeviceSharing, interval v1alpha1.TimeSliceInterval) v1alpha1.DeviceSharing {
	s.TimeSliceInterval = interval
	return s
}

func served(name string, percentage int32, limit int64) v1alpha1.DeviceSharing {
	return v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled, MPS: &v1alpha1.MPSDaemon{
		ResourceName: name, Owner: v1alpha1.MPSDaemonOwnerGPUSharing,
		ActiveThreadPercentage: percentage, PinnedMemoryLimit: resource.NewQuantity(limit<<20, resource.BinarySI),
	}}
}

func split(instances ...v1alpha1.InstanceCount) v1alpha1.DeviceSharing {
	return v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: instances}
}

func count(profile string, n int32) v1alpha1.InstanceCount {
	return v1alpha1.InstanceCount{Profile: profile, Count: n}
}

// states are all kinds of desired states, with the names of the profiles of one, two and three slices.
func states(one, two, three string) []state {
	gpuFour, gpuTen, shared := served(plan.ResourceGPU, 25, 3840), served(plan.ResourceGPU, 10, 1536), served(plan.ResourceGPUShared, 50, 7680)
	short, former := timed(whole(), v1alpha1.TimeSliceIntervalShort), v1alpha1.TimeSliceIntervalDefault
	sevenths, halves := split(count(one, 7)), split(count(three, 2))
	mix := split(count(one, 2), count(two, 1), count(three, 1))
	return []state{
		{"whole", [3]v1alpha1.DeviceSharing{whole(), whole(), whole()}},
		{"MPS for four", [3]v1alpha1.DeviceSharing{gpuFour, gpuFour, gpuFour}},
		{"MPS for ten", [3]v1alpha1.DeviceSharing{gpuTen, gpuTen, gpuTen}},
		{"MPS renamed", [3]v1alpha1.DeviceSharing{shared, shared, shared}},
		{"MPS on one GPU", [3]v1alpha1.DeviceSharing{whole(), gpuFour, whole()}},
		{"MPS on two GPUs", [3]v1alpha1.DeviceSharing{gpuFour, gpuFour, whole()}},
		{"MIG mode without instances", [3]v1alpha1.DeviceSharing{split(), whole(), whole()}},
		{"sevenths", [3]v1alpha1.DeviceSharing{sevenths, sevenths, whole()}},
		{"halves", [3]v1alpha1.DeviceSharing{halves, halves, whole()}},
		{"a mix of instances", [3]v1alpha1.DeviceSharing{mix, sevenths, whole()}},
		{"MIG beside MPS", [3]v1alpha1.DeviceSharing{mix, whole(), gpuTen}},
		{"two daemons", [3]v1alpha1.DeviceSharing{gpuFour, shared, whole()}},
		{"an interval", [3]v1alpha1.DeviceSharing{short, short, short}},
		{"MIG after an interval", [3]v1alpha1.DeviceSharing{timed(sevenths, former), timed(split(), former), timed(whole(), former)}},
	}
}

func (s state) specs(t *testing.T, w *world) []v1alpha1.DeviceSpec {
	t.Helper()
	var specs []v1alpha1.DeviceSpec
	for i, d := range w.devices(t) {
		specs = append(specs, v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: s.desired[i]})
	}
	return specs
}

// found are states in which a node may be found and that nobody asks for.
func found() map[string]func(n *sim.Node) {
	return map[string]func(n *sim.Node){
		"a freshly booted node": func(*sim.Node) {},
		"MIG mode pending":      func(n *sim.Node) { n.GPUs[0].PendingMIG = true },
		"MIG mode about to go": func(n *sim.Node) {
			n.GPUs[0].MIG = true
			n.GPUs[1].MIG, n.GPUs[1].PendingMIG = true, true
		},
		"a GPU instance without its compute instance": func(n *sim.Node) {
			n.GPUs[0].MIG, n.GPUs[0].PendingMIG = true, true
			n.GPUs[0].Instances = []sim.GPUInstance{{ID: 9, Profile: 19, Placement: gpu.Placement{Start: 2, Size: 1}}}
		},
		"a compute instance smaller than its GPU instance": func(n *sim.Node) {
			n.GPUs[1].MIG, n.GPUs[1].PendingMIG = true, true
			n.GPUs[1].Instances = []sim.GPUInstance{{
				ID: 1, Profile: 9, Placement: gpu.Placement{Start: 0, Size: 4},
				Compute: []sim.ComputeInstance{{Slices: 1, UUID: "MIG-1c"}},
			}}
		},
		"EXCLUSIVE_PROCESS without a daemon": func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].ComputeMode = gpu.ComputeExclusiveProcess
			}
		},
		"a GPU that is PROHIBITED": func(n *sim.Node) { n.GPUs[2].ComputeMode = gpu.ComputeProhibited },
	}
}

// TestConverges takes a node from every state to every other one, with a crash after every step, with a crash in the
// middle of each creation, and with every call failing once.
func TestConverges(t *testing.T) {
	ampere, hopper := states("1g.5gb", "2g.10gb", "3g.20gb"), states("1g.10gb", "2g.20gb", "3g.40gb")
	cases := map[string]struct {
		model   sim.Model
		lazy    bool
		desired []state
	}{
		"an Ampere GPU that the driver resets": {model: sim.A100, desired: ampere},
		"an Ampere GPU that we reset":          {model: sim.A100, desired: ampere, lazy: true},
		"a Hopper GPU, which needs no reset":   {model: sim.H100, desired: hopper},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			blank := newWorld(c.model, c.model, sim.T4)
			blank.lazy = c.lazy
			for from, start := range startsFrom(t, blank, c.desired) {
				for _, to := range c.desired {
					t.Run("from "+from+" to "+to.name, func(t *testing.T) {
						converges(t, start, to.specs(t, start))
					})
				}
			}
		})
	}
}

// startsFrom are nodes in all the states that are found and all that are desired.
func startsFrom(t *testing.T, blank *world, desired []state) map[string]*world {
	t.Helper()
	starts := map[string]*world{}
	for name, change := range found() {
		starts[name] = blank.copy()
		starts[name].Update(change)
	}
	for _, s := range desired {
		w := blank.copy()
		NewWithT(t).Expect(w.settle(t, s.specs(t, w))).To(Succeed(), s.name)
		w.calls = 0
		starts[s.name] = w
	}
	return starts
}

func converges(t *testing.T, start *world, desired []v1alpha1.DeviceSpec) {
	t.Helper()
	g := NewWithT(t)
	straight := start.copy()
	steps, err := straight.reconcile(t, desired, all)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(straight.differs(t, desired)).To(Succeed(), "one plan reaches the end")
	g.Expect(straight.reconcile(t, desired, all)).To(Equal(0), "nothing is left to do")

	for k := range steps {
		w := start.copy()
		_, err := w.reconcile(t, desired, k)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(w.settle(t, desired)).To(Succeed(), "after a crash after %d steps", k)
	}
	for k := 1; k <= straight.calls; k++ {
		w := start.copy()
		w.fail = func(call int) error {
			if call == k {
				return errInjected
			}
			return nil
		}
		_, err := w.reconcile(t, desired, all)
		g.Expect(err).To(MatchError(errInjected), "call %d", k)
		g.Expect(w.settle(t, desired)).To(Succeed(), "after call %d failed", k)
	}
	crashesWhileCreating(t, start, desired)
}

// crashesWhileCreating ends the process between the two halves of each creation.
func crashesWhileCreating(t *testing.T, start *world, desired []v1alpha1.DeviceSpec) {
	t.Helper()
	for k := 1; ; k++ {
		w := start.copy()
		creations := 0
		w.Fail = func(op sim.Op, _ string) error {
			if op == sim.OpCreateComputeInstance {
				if creations++; creations == k {
					return sim.ErrCrash
				}
			}
			return nil
		}
		_, err := w.reconcile(t, desired, all)
		if creations < k {
			return
		}
		NewWithT(t).Expect(err).To(MatchError(sim.ErrCrash))
		NewWithT(t).Expect(w.settle(t, desired)).To(Succeed(), "after a crash within creation %d", k)
	}
}
