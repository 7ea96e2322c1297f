// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

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
			c := newSite()
			h := c.add("a", sim.A100, sim.A100, sim.A100, sim.A100)
			c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("3g.20gb", 2)), evicting, selects)}
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
	c := newSite()
	h := c.add("a", sim.A100, sim.A100, sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("3g.20gb", 2)), onGPUs(0, 1))}
	c.run(300)
	kept := h.partitionedGPUs()[1]
	lost := c.loseGPU(h, 0)
	d, _ := c.run(300)
	g.Expect(h.partitionedGPUs()).To(Equal([]string{kept}))
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonGPUMissing))
	g.Expect(d.Nodes[0].Message).To(ContainSubstring("The node no longer has GPU 0 (%s), which gpuSelector.indexes selected", lost.UUID))
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
	c := newSite()
	h := c.add("a", sim.A100, sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("3g.20gb", 2)), onGPUs(1))}
	c.run(300)
	c.loseGPU(h, 1)
	for _, lose := range []func(){func() {}, func() { c.loseGPUNode(h) }} {
		lose()
		d, _ := c.run(60)
		g.Expect(d.Nodes[0].State).To(Equal(node.Unsupported))
		g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonGPUMissing))
		g.Expect(h.partitionedGPUs()).To(BeEmpty())
	}
	g.Expect(h.GPU.Spec.Release).To(Equal(node.ReleaseFor(&c.Policies[0])))
}

// TestIndexesThatTheUserEditsAreThoseOfToday: a user who edits them looks at what nvidia-smi prints now.
func TestIndexesThatTheUserEditsAreThoseOfToday(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100, sim.A100, sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("3g.20gb", 2)), onGPUs(1))}
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
