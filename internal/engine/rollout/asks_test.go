// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestALostAgentTakesNothingWhenItIsBack: the node takes pods again meanwhile, and the agent does not see what their
// init containers hold. The change begins anew, with a drain.
func TestALostAgentTakesNothingWhenItIsBack(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100)
	h.partitionedByHand()
	byHand := h.instances()
	c.tick(time.Second)
	h.lags = true
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("1g", 7)))}
	for range 60 {
		if len(h.GPU.Spec.Devices) == 0 {
			c.steps(1)
		}
	}
	g.Expect(h.GPU.Spec.Devices).NotTo(BeEmpty())
	h.AgentReady = false
	c.during(time.Hour, time.Minute)
	g.Expect(h.isKept()).To(BeFalse())
	h.AgentReady, h.lags = true, false
	h.converge()
	g.Expect(h.instances()).To(Equal(byHand))
	c.run(120)
	g.Expect(h.instances()).To(HaveLen(7))
}

// TestALabelOfAConfigurationThatIsGoneIsTakenBack on a node whose policy cannot be honoured: the operator was removed by
// force with its ConfigMap, and installed again.
func TestALabelOfAConfigurationThatIsGoneIsTakenBack(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.T4)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", timeSlicing(4))}
	c.run(120)
	g.Expect(h.Labels).To(HaveKey(v1alpha1.LabelConfig))
	c.Configs, c.ConfigsCopy = nil, nil
	c.Policies[0].Generation++
	c.Policies[0].Spec.Sharing = mig(count("1g", 7))
	d := c.during(10*time.Minute, time.Minute)
	g.Expect(d.Nodes[0].State).To(Equal(node.Unsupported))
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
}
