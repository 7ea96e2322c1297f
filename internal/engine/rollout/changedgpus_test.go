// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// onGPUs selects GPUs by index.
func onGPUs(indexes ...int32) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.Spec.GPUSelector = &v1alpha1.GPUMatch{Indexes: indexes} }
}

// edit changes the first policy.
func (c *site) edit(change func(*v1alpha1.GPUSharingPolicy)) {
	change(&c.Policies[0])
	c.Policies[0].Generation++
}

// replace puts another GPU of the same model into the slot of one, as after a repair, and starts the machine again.
func (c *site) replace(h *host, index int) {
	fresh, err := sim.NewNode("spare", sim.A100)
	if err != nil {
		panic(err)
	}
	h.hardware.Update(func(n *sim.Node) { n.GPUs[index] = fresh.GPUs[0] })
	h.plugin.running = false
	c.tick(time.Second)
}

// byHand lets a user make one instance of a profile on a GPU, with nvidia-smi.
func (h *host) byHand(index int, profile string) {
	d, ctx := h.devices()[index], context.Background()
	p := d.Profiles[slices.IndexFunc(d.Profiles, func(p gpu.Profile) bool { return p.Name == profile })]
	err := errors.Join(h.hardware.SetMIG(ctx, d.UUID, true), h.hardware.Reset(ctx, d.UUID),
		h.hardware.CreateInstance(ctx, d.UUID, profile, gpu.Placement{Start: p.Starts[0], Size: p.Size}))
	if err != nil {
		panic(err)
	}
	h.report()
}

// TestAReplacedGPUReturnsToTheStateInWhichItCame: it has a baseline of its own.
func TestAReplacedGPUReturnsToTheStateInWhichItCame(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100)
	c.setPolicy("research", mig(count("3g.20gb", 2)))
	c.run(200)
	g.Expect(c.ready()).To(Equal(1))
	c.replace(h, 1)
	c.run(400)
	g.Expect(c.ready()).To(Equal(1))
	isOffered(g, h, map[string]int64{"nvidia.com/mig-3g.20gb": 4})

	c.Policies = nil
	c.run(400)
	isForgotten(g, h)
	g.Expect(h.devices()[1].State.MIG).To(BeFalse())
	isOffered(g, h, gpusOnly(2))
}

// TestAChangedGPUWithoutABaselineReturnsToNoMIG: an earlier version of the operator did not record it.
func TestAChangedGPUWithoutABaselineReturnsToNoMIG(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(200)
	h.GPU.Spec.Baseline.Devices = h.GPU.Spec.Baseline.Devices[:1]
	h.GPU.Generation++
	c.Policies = nil
	c.run(400)
	isForgotten(g, h)
	isOffered(g, h, gpusOnly(2))
}

// TestADeselectedGPUReturnsToItsBaseline before the node is ready again, and is the user's from then on.
func TestADeselectedGPUReturnsToItsBaseline(t *testing.T) {
	for name, profile := range map[string]string{"whole": "", "partitioned by hand": "2g.10gb"} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100, sim.A100)
			if profile != "" {
				h.byHand(1, profile)
			}
			before := h.GPU.Status.Devices[1].Sharing
			c.setPolicy("research", mig(count("3g.20gb", 2)))
			c.run(200)
			g.Expect(c.ready()).To(Equal(1))

			c.edit(onGPUs(0))
			d := rollout.Decide(c.world())
			g.Expect(d.Policies["research"].Nodes.Ready).To(BeZero(), "GPU 1 is partitioned still")
			d, _ = c.run(400)
			g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(1)))
			g.Expect(h.GPU.Status.Devices[1].Sharing).To(Equal(before))
			g.Expect(advertised(h)).To(HaveKeyWithValue("nvidia.com/mig-3g.20gb", int64(2)))
			g.Expect(h.GPU.Spec.Devices).To(HaveLen(1))
			g.Expect(h.GPU.Spec.Baseline.Devices).To(HaveLen(1))

			writes := c.writes["action.SetSpec"]
			c.run(60)
			g.Expect(c.writes["action.SetSpec"]).To(Equal(writes), "there is nothing left to do")
		})
	}
}

// TestADeselectedGPUInUseKeepsThePolicyFromReady until nobody uses it.
func TestADeselectedGPUInUseKeepsThePolicyFromReady(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(200)
	instance := h.devices()[1].State.Instances[0].ID
	c.hold(h, "train", 1, instance)
	c.edit(onGPUs(0))
	c.steps(30)
	d := rollout.Decide(c.world())
	g.Expect(d.Policies["research"].Nodes.Ready).To(BeZero())
	hasMessage(g, d, "pod user/train (GPU 1")
	g.Expect(c.evicted).To(BeEmpty())
	c.end(h, "train")
	d, _ = c.run(400)
	g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(1)))
	g.Expect(h.devices()[1].State.MIG).To(BeFalse())
}

// TestAGPUThatWasAwayReturnsToItsBaselineOnceItIsBack, though it was deselected meanwhile.
func TestAGPUThatWasAwayReturnsToItsBaselineOnceItIsBack(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(200)
	var away []sim.GPU
	h.hardware.Update(func(n *sim.Node) { away = n.GPUs[1:]; n.GPUs = n.GPUs[:1] })
	c.edit(onGPUs(0))
	h.plugin.running = false
	c.tick(time.Second)
	c.run(400)
	h.hardware.Update(func(n *sim.Node) { n.GPUs = append(n.GPUs, away...) })
	h.plugin.running = false
	c.tick(time.Second)
	c.run(400)
	g.Expect(c.ready()).To(Equal(1))
	g.Expect(h.devices()[1].State.MIG).To(BeFalse())
}

// TestAGPUThatNoPolicySelectedIsLeftAlone by the way back too: what is on it is the user's.
func TestAGPUThatNoPolicySelectedIsLeftAlone(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(onGPUs(0))
	c.run(200)
	g.Expect(c.ready()).To(Equal(1))
	h.byHand(1, "7g.40gb")
	by := h.GPU.Status.Devices[1].Sharing
	c.Policies = nil
	c.run(400)
	isForgotten(g, h)
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	g.Expect(h.GPU.Status.Devices[1].Sharing).To(Equal(by))
}

// TestAGPUThatAFailedPolicyChangedReturnsToItsBaseline, though the last good state does not list it.
func TestAGPUThatAFailedPolicyChangedReturnsToItsBaseline(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(onGPUs(0))
	c.run(200)
	h.breaks(h.Labels[v1alpha1.LabelConfig])
	c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.GPUSelector, p.Spec.Sharing = nil, mig(count("1g", 7)) })
	d, _ := c.run(600)
	isFailed(g, d)
	g.Expect(h.devices()[1].State.MIG).To(BeFalse())
	g.Expect(h.devices()[0].State.Instances).To(HaveLen(3))
}

// leftBehind is a node with two GPUs that a policy with releasePolicy Retain shared.
func leftBehind(by v1alpha1.Sharing) (*site, *host) {
	c, h := toMIG(func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.ReleasePolicy, p.Spec.Sharing = v1alpha1.ReleasePolicyRetain, by
	})
	c.run(200)
	c.Policies = nil
	c.run(60)
	return c, h
}

func (c *site) otherForGPU0() {
	c.setPolicy("other", mig(count("3g.20gb", 2)), onGPUs(0))
}

// TestWhatARetainingPolicyLeftIsNotTakenDownByAnother that selects other GPUs, also where the GPUNode is lost with the
// kind before it comes: the copy of the baseline names the indexes of no policy that is gone.
func TestWhatARetainingPolicyLeftIsNotTakenDownByAnother(t *testing.T) {
	const kept, unwritten = "another comes", "the copy was not written, the GPUNode is lost, and another comes"
	for _, name := range []string{kept, "the GPUNode is lost, and another comes", unwritten} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(onGPUs(0, 1), retaining)
			c.run(200)
			before := h.Annotations[v1alpha1.AnnotationBaseline]
			c.Policies = nil
			c.run(60)
			if name == unwritten {
				h.Annotations[v1alpha1.AnnotationBaseline] = before
				c.run(60)
			}
			c.hold(h, "train", 1, h.devices()[1].State.Instances[0].ID)
			if name != kept {
				c.loseGPUNode(h)
			}
			c.otherForGPU0()
			c.edit(evicting)
			if name != kept {
				c.tick(timing.PoliciesReturn)
			}
			c.run(400)
			g.Expect(c.evicted).To(BeEmpty())
			g.Expect(c.ready()).To(Equal(1))
			g.Expect(h.devices()[0].State.Instances).To(HaveLen(2))
			g.Expect(h.devices()[1].State.Instances).To(HaveLen(3))
		})
	}
}

// TestARetainingPolicyThatIsLostWithTheKindsKeepsItsGPUs: GPU 0 has died, so the others count from 0, and the policy
// comes back some minutes after the kinds. It takes no GPU that was never its own.
func TestARetainingPolicyThatIsLostWithTheKindsKeepsItsGPUs(t *testing.T) {
	for name, with := range map[string]func(*v1alpha1.GPUSharingPolicy){"it retains": retaining, "it restores": evicting} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100, sim.A100, sim.A100)
			c.setPolicy("research", mig(count("2g", 3)), onGPUs(1), evicting, with)
			c.run(200)
			c.loseGPU(h, 0)
			c.run(100)
			c.hold(h, "train", 1, gpu.WholeGPU)
			before := h.partitionedGPUs()
			lost := c.Policies
			c.Policies = nil
			c.loseGPUNode(h)
			c.during(2*time.Minute, time.Second)
			c.Policies = lost
			c.during(30*time.Minute, time.Second)
			g.Expect(c.evicted).To(BeEmpty())
			g.Expect(c.ready()).To(Equal(1))
			g.Expect(h.partitionedGPUs()).To(Equal(before))
		})
	}
}

// TestAGPUThatARetainingPolicyLeftUnderMPSReturns where another policy selects others: the daemon that serves them all
// ends with its configuration, and nobody but the operator would open the GPU again (974274). The spec does not tell of
// it where the GPUNode was lost, or where the policy went in the middle of another change.
func TestAGPUThatARetainingPolicyLeftUnderMPSReturns(t *testing.T) {
	for name, comes := range map[string]func(*WithT, *site, *host){
		"another comes":                          func(_ *WithT, c *site, _ *host) { c.otherForGPU0() },
		"the GPUNode is lost, and another comes": func(_ *WithT, c *site, h *host) { c.loseGPUNode(h); c.otherForGPU0(); c.tick(timing.PoliciesReturn) },
		"it went while the agent was asked for instances": func(g *WithT, c *site, h *host) {
			c.setPolicy("research", mig(count("2g", 3)), retaining)
			h.lags = true
			c.waitsUntil(g, func() bool {
				return len(h.GPU.Spec.Devices) > 0 && h.GPU.Spec.Devices[1].Sharing.MIGMode == v1alpha1.MIGModeEnabled
			})
			c.Policies = nil
			c.steps(5)
			h.lags = false
			c.otherForGPU0()
		},
		"the GPU is away when another comes": func(_ *WithT, c *site, h *host) {
			away := c.loseGPU(h, 1)
			c.otherForGPU0()
			c.run(400)
			h.hardware.Update(func(n *sim.Node) { n.GPUs = append(n.GPUs, away) })
			h.plugin.running = false
			c.tick(time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := leftBehind(mps(2))
			g.Expect(h.devices()[1].State.ComputeMode).To(Equal(gpu.ComputeExclusiveProcess))
			comes(g, c, h)
			c.run(400)
			g.Expect(c.ready()).To(Equal(1))
			g.Expect(h.devices()[1].State.MPS).To(BeNil())
			g.Expect(h.devices()[1].State.ComputeMode).To(Equal(gpu.ComputeDefault))
			g.Expect(h.GPU.Spec.Baseline.Devices).To(HaveLen(1))
		})
	}
}

// TestAGPUThatAUserPutIntoMIGModeIsTheirs, though a retaining policy left it under MPS before that.
func TestAGPUThatAUserPutIntoMIGModeIsTheirs(t *testing.T) {
	g := NewWithT(t)
	c, h := leftBehind(mps(2))
	h.byHand(1, "7g.40gb")
	c.hold(h, "train", 1, h.devices()[1].State.Instances[0].ID)
	c.otherForGPU0()
	c.edit(evicting)
	c.run(400)
	g.Expect(c.evicted).To(BeEmpty())
	g.Expect(c.ready()).To(Equal(1))
	g.Expect(h.devices()[1].State.Instances).To(HaveLen(1))
}

// TestWhatARetainingPolicyLeftOutlivesAnother that fails, or is deleted before it is done, and selects other GPUs.
func TestWhatARetainingPolicyLeftOutlivesAnother(t *testing.T) {
	for name, fails := range map[string]bool{"it fails": true, "it is deleted": false} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := leftBehind(mig(count("2g", 3)))
			h.breaks(h.Labels[v1alpha1.LabelConfig])
			c.otherForGPU0()
			c.steps(60)
			g.Expect(h.devices()[0].State.Instances).To(HaveLen(2))
			h.destroy(1) // by a user
			left := h.GPU.Status.Devices[1].Sharing
			if fails {
				d, _ := c.run(600)
				isFailed(g, d)
				g.Expect(h.devices()[0].State.Instances).To(HaveLen(3))
				g.Expect(h.GPU.Status.Devices[1].Sharing).To(Equal(left))
			}
			h.broken, c.Policies = nil, nil
			c.run(600)
			isForgotten(g, h)
			g.Expect(h.devices()[0].State.MIG).To(BeFalse())
			g.Expect(h.GPU.Status.Devices[1].Sharing).To(Equal(left))
		})
	}
}

// TestADeselectedGPUWithSharedInstancesReturns: NVIDIA's device plugin would share its instances too, but they go.
func TestADeselectedGPUWithSharedInstancesReturns(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Sharing.MIG.Layouts[0].Instances[0].Replicas = 2
	})
	c.run(200)
	g.Expect(c.ready()).To(Equal(1))
	c.edit(onGPUs(0))
	c.run(400)
	g.Expect(c.ready()).To(Equal(1))
	g.Expect(h.devices()[1].State.MIG).To(BeFalse())
}

// loseGPU takes a GPU out of a machine: the driver counts the others anew.
func (c *site) loseGPU(h *host, index int) (lost sim.GPU) {
	h.hardware.Update(func(n *sim.Node) {
		lost = n.GPUs[index]
		n.GPUs = append(n.GPUs[:index:index], n.GPUs[index+1:]...)
	})
	h.plugin.running = false
	c.tick(time.Second)
	return lost
}

// partitionedGPUs lists the UUIDs of the GPUs in MIG mode.
func (h *host) partitionedGPUs() []string {
	var uuids []string
	for _, d := range h.devices() {
		if d.State.MIG {
			uuids = append(uuids, d.UUID)
		}
	}
	return uuids
}

// TestAPolicyKeepsTheGPUsThatItSelectedByIndex when one dies and the others are counted anew, also if the GPUNode is lost then.
func TestAPolicyKeepsTheGPUsThatItSelectedByIndex(t *testing.T) {
	for name, selects := range map[string]func(*v1alpha1.GPUSharingPolicy){
		"gpuSelector": onGPUs(1, 2),
		"layout": func(p *v1alpha1.GPUSharingPolicy) {
			p.Spec.Sharing.MIG.Layouts[0].GPUs = &v1alpha1.GPUMatch{Indexes: []int32{1, 2}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100, sim.A100, sim.A100, sim.A100)
			c.setPolicy("research", mig(count("3g.20gb", 2)), evicting, selects)
			c.run(300)
			g.Expect(c.ready()).To(Equal(1))
			selected := h.partitionedGPUs()
			g.Expect(selected).To(HaveLen(2))
			c.hold(h, "train", 3, gpu.WholeGPU)
			c.tick(time.Minute)
			for _, lose := range []func(){func() { c.loseGPU(h, 0) }, func() { c.loseGPUNode(h) }} {
				lose()
				c.run(300)
				g.Expect(c.evicted).To(BeEmpty())
				g.Expect(h.partitionedGPUs()).To(Equal(selected))
				g.Expect(c.ready()).To(Equal(1))
			}
		})
	}
}

// TestAMissingGPUIsReported, and the one that takes its place is shared in its stead.
func TestAMissingGPUIsReported(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100, sim.A100)
	c.setPolicy("research", mig(count("3g.20gb", 2)), onGPUs(0, 1))
	c.run(300)
	kept := h.partitionedGPUs()[1]
	lost := c.loseGPU(h, 0)
	d, _ := c.run(300)
	g.Expect(h.partitionedGPUs()).To(Equal([]string{kept}))
	hasReason(g, d, v1alpha1.ReasonGPUMissing)
	hasMessage(g, d, "The node no longer has GPU 0 ("+lost.UUID+"), which gpuSelector.indexes selected")
	g.Expect(d.Policies["research"].Pending).To(HaveLen(1))

	fresh, err := sim.NewNode("spare", sim.A100)
	g.Expect(err).NotTo(HaveOccurred())
	h.hardware.Update(func(n *sim.Node) { n.GPUs = append(fresh.GPUs[:1:1], n.GPUs...) })
	h.plugin.running = false
	c.tick(time.Second)
	d, _ = c.run(300)
	g.Expect(h.partitionedGPUs()).To(Equal([]string{fresh.GPUs[0].UUID, kept}))
	g.Expect(d.Policies["research"].Pending).To(BeEmpty())
}

// TestANodeWhoseSelectedGPUsAreAllMissingStaysGoverned: nothing else on it is shared, and nothing is restored. If its GPUNode is lost, another
// one says so, and how the policy releases the node.
func TestANodeWhoseSelectedGPUsAreAllMissingStaysGoverned(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100)
	c.setPolicy("research", mig(count("3g.20gb", 2)), onGPUs(1))
	c.run(300)
	c.loseGPU(h, 1)
	for _, lose := range []func(){func() {}, func() { c.loseGPUNode(h) }} {
		lose()
		d, _ := c.run(60)
		hasState(g, d, node.Unsupported)
		hasReason(g, d, v1alpha1.ReasonGPUMissing)
		g.Expect(h.partitionedGPUs()).To(BeEmpty())
	}
	g.Expect(h.GPU.Spec.Release).To(Equal(node.ReleaseFor(&c.Policies[0])))
}

// TestIndexesThatTheUserEditsAreThoseOfToday: a user who edits them looks at what nvidia-smi prints now.
func TestIndexesThatTheUserEditsAreThoseOfToday(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100, sim.A100)
	c.setPolicy("research", mig(count("3g.20gb", 2)), onGPUs(1))
	c.run(300)
	c.loseGPU(h, 0)
	c.edit(onGPUs(1))
	c.edit(onGPUs(0, 1))
	c.run(300)
	g.Expect(h.partitionedGPUs()).To(HaveLen(2))
	c.edit(onGPUs(1))
	c.run(300)
	g.Expect(h.partitionedGPUs()).To(Equal([]string{h.devices()[1].UUID}))
}
