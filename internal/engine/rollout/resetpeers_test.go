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

// Without a fabric manager, the GPUs behind NVSwitches are reset together, which the agent learns from a reset.
func TestGPUsThatAreResetTogetherAreDrainedTogether(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100, sim.A100)
	h.hardware.Update(func(n *sim.Node) { n.NVSwitch = true })
	h.report()
	c.hold(h, "train", 1, gpu.WholeGPU)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", firstGPU(), func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Rollout.Drain.Mode = v1alpha1.DrainModeEvict
	})}
	for range 60 {
		c.reconcile()
		c.tick(time.Second)
		if len(h.devices()[0].ResetPeers) > 0 {
			break
		}
		g.Expect(c.evicted).To(BeEmpty(), "the other GPU is not concerned before a reset has told")
	}
	d, _ := c.run(400)
	g.Expect(c.evicted).To(Equal([]string{"train"}))
	g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), "%+v", d.Nodes[0])
	g.Expect(advertised(h)).To(Equal(map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-1g.5gb": 7}))
}
