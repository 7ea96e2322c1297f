// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func interval(i v1alpha1.TimeSliceInterval) v1alpha1.Sharing {
	s := timeSlicing(4)
	s.TimeSlicing.Interval = i
	return s
}

// slices are the time slices of the GPUs of a host.
func (h *host) slices() []gpu.TimeSlice {
	var all []gpu.TimeSlice
	for _, d := range h.devices() {
		all = append(all, h.timeSlice(d.UUID))
	}
	return all
}

// hidden are those slices, also of GPUs whose MIG mode hides them.
func (h *host) hidden() (all []gpu.TimeSlice) {
	h.hardware.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			all = append(all, n.GPUs[i].Slice)
		}
	})
	return all
}

// found sets the time slices that the GPUs of a host have before any policy.
func (h *host) found(slice gpu.TimeSlice) {
	h.hardware.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			n.GPUs[i].Slice = slice
		}
	})
}

// TestAnIntervalComesAndGoesWithoutDisruption: what was found is recorded before anything is set, and restored.
func TestAnIntervalComesAndGoesWithoutDisruption(t *testing.T) {
	for name, leave := range map[string]func(c *site){
		"the field is removed":      func(c *site) { c.setSharing(timeSlicing(4)) },
		"another strategy is asked": func(c *site) { c.setSharing(v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}) },
		"the policy is deleted":     func(c *site) { c.Policies = nil },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(2, timeSlicing(4))
			for _, h := range c.hosts {
				h.found(gpu.TimeSliceMedium)
			}
			c.run(60)
			h := c.hosts["n0"]
			g.Expect(h.hardware.Writes()).To(BeEmpty())
			g.Expect(h.GPU.Status.Devices[0].Sharing.TimeSliceInterval).To(BeEmpty(), "nobody asked for it")
			config := h.GPU.Spec.ConfigName

			c.setSharing(interval(v1alpha1.TimeSliceIntervalShort))
			for range 60 {
				d := c.reconcile()
				for _, a := range d.Actions {
					g.Expect(a).NotTo(Or(BeAssignableToTypeOf(action.Taint{}), BeAssignableToTypeOf(action.Evict{})))
				}
				c.tick(time.Second)
			}
			g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceShort))
			g.Expect(c.reconcile().Nodes[0].State).To(Equal(node.UpToDate))
			g.Expect(h.GPU.Spec.ConfigName).To(Equal(config), "the device plugin is not concerned")
			for _, b := range h.GPU.Spec.Baseline.Devices {
				g.Expect(b.Sharing.TimeSliceInterval).To(Equal(v1alpha1.TimeSliceIntervalMedium))
			}
			g.Expect(h.Annotations[v1alpha1.AnnotationBaseline]).To(ContainSubstring("Medium"), "in both records")

			h.hardware.Reboot()
			c.tick(time.Second)
			c.run(10)
			g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceShort), "the driver forgets it")

			leave(c)
			c.run(80)
			g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceMedium))
		})
	}
}

// TestAnIntervalThatTheDriverDoesNotHaveFailsTheNodeAndChangesNothing: it is known only once the agent has asked the
// driver.
func TestAnIntervalThatTheDriverDoesNotHaveFailsTheNodeAndChangesNothing(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, timeSlicing(4))
	c.run(60)
	h := c.hosts["n0"]
	h.noTimeSlice = true
	before := *h.GPU.Spec.DeepCopy()
	c.setSharing(interval(v1alpha1.TimeSliceIntervalLong))
	_, states := c.run(60)
	g.Expect(states["n0"]).To(ContainElement(node.Failed))
	g.Expect(h.GPU.Status.Rollout.Failed.Message).To(ContainSubstring("has no time slice to set"))
	g.Expect(h.hardware.Writes()).To(BeEmpty())
	g.Expect(h.GPU.Spec.Devices).To(Equal(before.Devices), "rolled back")
	g.Expect(h.GPU.Spec.Baseline).To(Equal(before.Baseline))
	g.Expect(slices.Max(h.slices())).To(Equal(gpu.TimeSliceNone))
}

// TestADeselectedGPUHasItsTimeSliceBack: also where NVIDIA's DRA driver serves the node by then.
func TestADeselectedGPUHasItsTimeSliceBack(t *testing.T) {
	for name, toDRA := range map[string]bool{"device plugin": false, "DRA driver": true} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100, sim.A100)
			h.found(gpu.TimeSliceMedium)
			c.setPolicy("research", interval(v1alpha1.TimeSliceIntervalLong))
			c.settles(g, 200)
			g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceLong))
			if toDRA {
				c.switchOver(h, true)
				c.tick(time.Second)
			}
			c.edit(func(p *v1alpha1.GPUSharingPolicy) {
				p.Spec.Sharing, p.Spec.GPUSelector = mig(count("1g", 7)), &v1alpha1.GPUMatch{Indexes: []int32{0}}
			})
			isUpToDate(g, c.during(20*time.Minute, 10*time.Second).Nodes[0])
			g.Expect(h.timeSlice(h.devices()[1].UUID)).To(Equal(gpu.TimeSliceMedium))
		})
	}
}

// TestMIGModeHidesNoIntervalOfTheOperator: nobody can read or set one in MIG mode, and it is there again when that ends.
func TestMIGModeHidesNoIntervalOfTheOperator(t *testing.T) {
	for name, toMIG := range map[string]func(*site){
		"as the GPUs were found":   func(c *site) { c.Policies = nil },
		"as another policy asks":   func(c *site) { c.setSharing(mig(count("1g", 7))) },
		"as it asks for some GPUs": func(c *site) { c.edit(onGPUs(0)); c.setSharing(mig(count("1g", 7))) },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.H100, sim.H100)
			h.byHand(0, "2g.20gb")
			h.byHand(1, "2g.20gb")
			h.found(gpu.TimeSliceMedium)
			c.setPolicy("research", interval(v1alpha1.TimeSliceIntervalLong))
			c.settles(g, 200)
			g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceLong))
			toMIG(c)
			c.run(400)
			g.Expect(h.devices()).To(HaveEach(HaveField("State.MIG", true)))
			g.Expect(h.hidden()).To(HaveEach(gpu.TimeSliceMedium))
			c.Policies = nil
			c.run(400)
			isForgotten(g, h)
			g.Expect(h.hidden()).To(HaveEach(gpu.TimeSliceMedium))
		})
	}
}

// movedFromInterval is a node of which the operator had set the time slices, and which NVIDIA's DRA driver serves now, with the gate
// TimeSlicingSettings or without, under a policy that asks for none.
func movedFromInterval(t *testing.T, gate bool) (*WithT, *site, *host) {
	t.Helper()
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.found(gpu.TimeSliceMedium)
	c.setPolicy("research", interval(v1alpha1.TimeSliceIntervalLong))
	c.run(200)
	g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceLong))
	c.switchOver(h, true)
	h.driver.slices, h.SetsTimeSlices = gate, gate
	c.tick(time.Second)
	c.setSharing(v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive})
	isUpToDate(g, c.during(20*time.Minute, 10*time.Second).Nodes[0])
	return g, c, h
}

// TestTheDRADriverInheritsNoInterval: it sets time slices with a feature gate alone, so without it the operator restores its own.
func TestTheDRADriverInheritsNoInterval(t *testing.T) {
	for name, gate := range map[string]bool{"nobody else sets it": false, "the driver sets it": true} {
		t.Run(name, func(t *testing.T) {
			g, c, h := movedFromInterval(t, gate)
			want := gpu.TimeSliceMedium
			if gate {
				want = gpu.TimeSliceLong
			}
			g.Expect(h.slices()).To(HaveEach(want))
			h.found(gpu.TimeSliceShort)
			c.during(20*time.Minute, 10*time.Second)
			if gate {
				want = gpu.TimeSliceShort
			}
			g.Expect(h.slices()).To(HaveEach(want))
		})
	}
}

// TestADriverThatIsReplacedSetsTimeSlicesAllTheSame: for 30 s only what it has published tells of it.
func TestADriverThatIsReplacedSetsTimeSlicesAllTheSame(t *testing.T) {
	g, c, h := movedFromInterval(t, true)
	h.found(gpu.TimeSliceShort) // the driver, for a claim whose pod runs
	h.driver.serves, h.SetsTimeSlices, h.DRA = false, false, "ResourceSlice a"
	h.driver.gone = c.Now
	h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA })
	c.during(15*time.Second, time.Second)
	g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceShort))
}
