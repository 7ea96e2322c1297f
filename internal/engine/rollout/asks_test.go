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

// TestAnAgentTakesNothingFromANodeThatTakesPodsAgain once it is back, or reports again: it does not see what their init containers hold. The
// change begins anew, with a drain.
func TestAnAgentTakesNothingFromANodeThatTakesPodsAgain(t *testing.T) {
	for name, meanwhile := range map[string]func(*site, *host) (back func()){
		"the agent is lost": func(_ *site, h *host) func() {
			h.AgentReady = false
			return func() { h.AgentReady = true }
		},
		"no device plugin can be configured": func(c *site, _ *host) func() {
			was := c.Plugin
			c.Plugin.Ready, c.Plugin.Reason, c.Plugin.Message = false, v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy"
			return func() { c.Plugin = was }
		},
	} {
		t.Run(name, func(t *testing.T) {
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
			back := meanwhile(c, h)
			c.during(time.Hour, time.Minute)
			g.Expect(h.isKept()).To(BeFalse())
			back()
			h.lags = false
			h.converge()
			g.Expect(h.instances()).To(Equal(byHand))
			c.run(120)
			g.Expect(h.instances()).To(HaveLen(7))
		})
	}
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
