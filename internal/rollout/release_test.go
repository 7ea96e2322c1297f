// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

func retaining(p *v1alpha1.GPUSharingPolicy) { p.Spec.DeletionPolicy = v1alpha1.DeletionPolicyRetain }

// observed is the generation that the status of the first policy is about.
func (c *cluster) observed() int64 {
	accepted, _ := condition.Find(c.Policies[0].Status.Conditions, v1alpha1.ConditionAccepted)
	return accepted.ObservedGeneration
}

// TestRetainIsObservedOnceEveryNodeHasIt, whatever keeps a node from its change.
func TestRetainIsObservedOnceEveryNodeHasIt(t *testing.T) {
	for name, hinders := range map[string]func(*cluster, *host){
		"nothing":                   func(*cluster, *host) {},
		"the agent does not run":    func(_ *cluster, h *host) { h.AgentReady = false },
		"the rollout is paused":     func(c *cluster, _ *host) { c.edit(paused) },
		"the node has opted out":    func(_ *cluster, h *host) { h.Labels[optOutLabel] = "false" },
		"the device plugin is gone": func(c *cluster, _ *host) { c.Wiring.Reason = v1alpha1.ReasonNoDevicePlugin },
		"instances have to change": func(c *cluster, _ *host) {
			c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g", 7)) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			c.run(200)
			hinders(c, h)
			c.edit(retaining)
			c.pass()
			g.Expect(c.observed()).To(BeNumerically("<", c.Policies[0].Generation), "the nodes do not have it yet")
			c.steps(1)
			g.Expect(c.observed()).To(Equal(c.Policies[0].Generation))
			h.AgentReady, c.Wiring.Reason = true, ""
			delete(h.Labels, optOutLabel)
			c.Policies = nil
			c.run(300)
			g.Expect(h.devices()[0].State.MIG).To(BeTrue())
			g.Expect(rollout.Decide(c.world()).Actions).To(BeEmpty())
		})
	}
}
