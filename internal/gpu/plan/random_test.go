// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// scatter puts a GPU into MIG mode with random instances, some of them used, some without a compute instance.
func scatter(r *rand.Rand, n *sim.Node, index int) {
	g := &n.GPUs[index]
	g.MIG, g.PendingMIG, g.ComputeMode = true, true, gpu.ComputeDefault
	g.Instances, g.Processes, g.Holders = nil, nil, nil
	profiles := g.Spec().Profiles
	for k := range r.IntN(9) {
		p := profiles[r.IntN(len(profiles))]
		free := g.FreePlacements(p)
		if len(free) == 0 {
			continue
		}
		i, err := n.CreateGPUInstance(g.UUID, p.ID, &free[r.IntN(len(free))])
		if err != nil {
			continue
		}
		id := i.ID
		if r.IntN(10) > 0 {
			_, _ = n.CreateComputeInstance(g.UUID, id, p.Slices)
		}
		switch r.IntN(6) {
		case 0:
			g.Processes = append(g.Processes, gpu.Process{PID: 100 + k, Name: "python", Instance: id})
		case 1:
			g.Holders = append(g.Holders, gpu.Holder{Namespace: "a", Pod: fmt.Sprint("p", k), Container: "c", Instance: id})
		}
	}
}

// wanted draws instances that fit on the empty GPU.
func (w *world) wanted(r *rand.Rand, index int) v1alpha1.DeviceSharing {
	want := map[string]int32{}
	w.Update(func(n *sim.Node) {
		g := n.GPUs[index]
		g.MIG, g.Instances = true, nil
		profiles := g.Spec().Profiles
		for range r.IntN(9) {
			p := profiles[r.IntN(len(profiles))]
			if free := g.FreePlacements(p); len(free) > 0 {
				g.Instances = append(g.Instances, sim.GPUInstance{Profile: p.ID, Placement: free[r.IntN(len(free))]})
				want[p.Name]++
			}
		}
	})
	s := split()
	for _, profile := range slices.Sorted(maps.Keys(want)) {
		s.Instances = append(s.Instances, count(profile, want[profile]))
	}
	return s
}

// TestRandomPlans draws what a GPU has, what of it is used and what is wanted. Each plan destroys what the best packing
// destroys, which package mig holds against an exhaustive search; it reaches its end; and it takes nothing from
// anybody whom its blockers do not name.
func TestRandomPlans(t *testing.T) {
	total := 100_000
	if testing.Short() {
		total = 5_000
	}
	models := []sim.Model{sim.A100, sim.A30, sim.H100, sim.B200, "rtx-pro-6000-blackwell-96gb"}
	for _, m := range models {
		t.Run(string(m), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(7, uint64(len(m))))
			w := newWorld(m)
			for range total / len(models) {
				w.Update(func(n *sim.Node) { scatter(r, n, 0) })
				if err := w.checkRandom(t, r); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// checkRandom plans a random desired state, frees what blocks it according to the plan, and carries it out.
func (w *world) checkRandom(t *testing.T, r *rand.Rand) error {
	t.Helper()
	have := w.devices(t)
	d := have[0]
	desired := []v1alpha1.DeviceSpec{{UUID: d.UUID, Sharing: w.wanted(r, 0)}}
	steps, err := plan.Node(desired, have)
	if err != nil {
		return err
	}
	fault := func() error {
		if err := destroysLeast(steps, d, desired[0].Sharing); err != nil {
			return err
		}
		w.free(steps, have)
		for _, s := range steps {
			if err := s.Do(t.Context(), w.tools()); err != nil {
				return err
			}
		}
		return errors.Join(w.differs(t, desired), w.keepsUsers(t))
	}()
	if fault == nil {
		return nil
	}
	return fmt.Errorf("%w: %v used by %v %v, desired state %+v, plan %v",
		fault, d.State.Instances, d.Processes, d.Holders, desired[0].Sharing, steps)
}

func destroysLeast(steps []plan.Step, d gpu.Device, s v1alpha1.DeviceSharing) error {
	want := map[string]int{}
	for _, i := range s.Instances {
		want[i.Profile] += int(i.Count)
	}
	p, err := mig.Pack(d, want)
	if err != nil {
		return err
	}
	destroyed, used := 0, 0
	for _, step := range steps {
		if !strings.Contains(step.String(), ": destroy ") {
			continue
		}
		destroyed++
		if len(plan.Blockers(step, []gpu.Device{d})) > 0 {
			used++
		}
	}
	if destroyed != len(p.Destroy) || used != len(p.InUse) {
		return fmt.Errorf("destroys %d, %d of them used, and the least is %v", destroyed, used, p)
	}
	return nil
}

// free ends everything that blocks a step, as a drain would.
func (w *world) free(steps []plan.Step, have []gpu.Device) {
	w.Update(func(n *sim.Node) {
		for _, s := range steps {
			for _, b := range plan.Blockers(s, have) {
				g := &n.GPUs[0]
				g.Processes = slices.DeleteFunc(g.Processes, func(p gpu.Process) bool { return b.Process != nil && p == *b.Process })
				g.Holders = slices.DeleteFunc(g.Holders, func(h gpu.Holder) bool { return b.Holder != nil && h == *b.Holder })
			}
		}
	})
}

// keepsUsers makes sure that every process and container that blocked nothing still has its instance.
func (w *world) keepsUsers(t *testing.T) error {
	t.Helper()
	d := w.devices(t)[0]
	there := func(id int) bool {
		return slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return i.ID == id })
	}
	for _, p := range d.Processes {
		if !there(p.Instance) {
			return fmt.Errorf("%+v has lost its instance", p)
		}
	}
	for _, h := range d.Holders {
		if !there(h.Instance) {
			return fmt.Errorf("%+v has lost its instance", h)
		}
	}
	return nil
}

// FuzzConverge takes a random node to a random desired state with one random call failing.
func FuzzConverge(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 0))
		models := []sim.Model{sim.A100, sim.A30, sim.H100, "rtx-pro-6000-blackwell-96gb"}
		w := newWorld(models[r.IntN(len(models))], models[r.IntN(len(models))], sim.T4)
		w.lazy = r.IntN(2) == 0
		mangle(t, r, w)
		failing := r.IntN(20)
		w.calls, w.fail = 0, func(call int) error {
			if call == failing {
				return errInjected
			}
			return nil
		}
		desired := randomDesired(t, r, w)
		if err := w.settle(t, desired); err != nil && !errors.Is(err, errInjected) {
			t.Fatal(err)
		}
		NewWithT(t).Expect(w.settle(t, desired)).To(Succeed())
	})
}

// mangle leaves the GPUs in some state that a node may be found in.
func mangle(t *testing.T, r *rand.Rand, w *world) {
	t.Helper()
	if r.IntN(2) == 0 {
		NewWithT(t).Expect(w.settle(t, randomDesired(t, r, w))).To(Succeed())
	}
	w.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			g := &n.GPUs[i]
			switch r.IntN(4) {
			case 0:
				g.PendingMIG = g.Spec().MIGCapable() && !g.PendingMIG
			case 1:
				if g.Spec().MIGCapable() && w.serves(g.UUID) == nil {
					scatter(r, n, i)
					g.Processes, g.Holders = nil, nil
				}
			case 2:
				if !g.MIG && w.serves(g.UUID) == nil {
					g.ComputeMode = []gpu.ComputeMode{gpu.ComputeDefault, gpu.ComputeProhibited, gpu.ComputeExclusiveProcess}[r.IntN(3)]
				}
			}
		}
	})
	if r.IntN(8) == 0 {
		clear(w.daemons)
	}
}

// randomDesired asks for something that is possible for each GPU, or for some.
func randomDesired(t *testing.T, r *rand.Rand, w *world) []v1alpha1.DeviceSpec {
	t.Helper()
	percentage := map[string]int32{plan.ResourceGPU: 1 + r.Int32N(100), plan.ResourceGPUShared: 1 + r.Int32N(100)}
	var desired []v1alpha1.DeviceSpec
	for _, d := range w.devices(t) {
		spec := v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: whole()}
		switch resource := []string{plan.ResourceGPU, plan.ResourceGPUShared}[r.IntN(2)]; r.IntN(3) {
		case 0:
			spec.Sharing = served(resource, percentage[resource], 1+r.Int64N(d.MemoryMiB))
		case 1:
			if d.MIGCapable {
				spec.Sharing = w.wanted(r, d.Index)
			}
		}
		if r.IntN(6) > 0 {
			desired = append(desired, spec)
		}
	}
	return desired
}
