// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

func retaining(p *v1alpha1.GPUSharingPolicy) { p.Spec.ReleasePolicy = v1alpha1.ReleasePolicyRetain }

// observed is the generation that the status of the first policy is about.
func (c *site) observed() int64 {
	accepted, _ := condition.Find(c.Policies[0].Status.Conditions, v1alpha1.ConditionAccepted)
	return accepted.ObservedGeneration
}

// TestRetainIsObservedOnceEveryNodeHasIt, whatever keeps a node from its change.
func TestRetainIsObservedOnceEveryNodeHasIt(t *testing.T) {
	for name, hinders := range map[string]func(*site, *host){
		"nothing":                   func(*site, *host) {},
		"the agent does not run":    func(_ *site, h *host) { h.AgentReady = false },
		"the rollout is paused":     func(c *site, _ *host) { c.edit(paused) },
		"the node has opted out":    func(_ *site, h *host) { h.Labels[optOutLabel] = "false" },
		"the device plugin is gone": func(c *site, _ *host) { c.Plugin.Reason = v1alpha1.ReasonNoDevicePlugin },
		"instances have to change": func(c *site, _ *host) {
			c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g", 7)) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			c.run(200)
			hinders(c, h)
			c.edit(retaining)
			c.reconcile()
			g.Expect(c.observed()).To(BeNumerically("<", c.Policies[0].Generation), "the nodes do not have it yet")
			c.steps(1)
			g.Expect(c.observed()).To(Equal(c.Policies[0].Generation))
			h.AgentReady, c.Plugin.Reason = true, ""
			delete(h.Labels, optOutLabel)
			c.Policies = nil
			c.run(300)
			g.Expect(h.devices()[0].State.MIG).To(BeTrue())
			g.Expect(rollout.Decide(c.world()).Actions).To(BeEmpty())
		})
	}
}

// TestANodeThatCannotBeRestoredReportsWhy: without NVIDIA's device plugin nothing can be restored, and without a policy
// there is no status that could report that.
func TestANodeThatCannotBeRestoredReportsWhy(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(60)
	h := c.hosts["n0"]
	c.Policies = nil
	c.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonNoDevicePlugin, Message: "there is no ClusterPolicy in this cluster"}
	d, _ := c.run(60)
	g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())
	g.Expect(h.waits()).To(Equal("NoDevicePlugin: There is no ClusterPolicy in this cluster"))
	g.Expect(d.Nodes).To(HaveLen(1))
	g.Expect(d.Nodes[0].State).NotTo(Equal(node.UpToDate))

	c.Plugin = cluster.DevicePlugin{Ready: true, ClusterPolicy: true, NodeFeatures: true}
	c.run(60)
	g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
	g.Expect(h.waits()).To(BeEmpty())
}

// TestANodeUnderMaintenanceReportsWhyItIsNotRestored: NVIDIA's upgrade of the driver may wait for ever for another
// node.
func TestANodeUnderMaintenanceReportsWhyItIsNotRestored(t *testing.T) {
	const state = "nvidia.com/gpu-driver-upgrade-state"
	for name, begins := range map[string]int{"before anything is restored": 0, "when the agent was asked": 1, "when all but the record is restored": 2} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(1, timeSlicing(4))
			c.run(60)
			h := c.hosts["n0"]
			c.Policies = nil
			for range begins {
				c.reconcile()
				c.tick(time.Second)
			}
			g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())
			h.Labels[state] = "upgrade-required"
			c.version["n0"]++
			c.run(60)
			g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())
			g.Expect(h.waits()).To(HavePrefix("DriverUpgrade: Waiting for a driver upgrade (" + state + "=upgrade-required)"))

			delete(h.Labels, state)
			c.version["n0"]++
			c.run(60)
			g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
			g.Expect(h.waits()).To(BeEmpty())
		})
	}
}

// TestANodeWhoseReleaseFailsIsNotInOneState: it is tried again. So what waits for it must not ask for a state.
func TestANodeWhoseReleaseFailsIsNotInOneState(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(200)
	c.Policies, c.hosts["n0"].lags = nil, true
	var last node.State
	since, longest := c.Now, time.Duration(0)
	for end := c.Now.Add(5 * time.Hour); c.Now.Before(end); c.tick(10 * time.Second) {
		d := c.reconcile()
		g.Expect(d.Nodes).To(HaveLen(1))
		g.Expect(d.Nodes[0].State).NotTo(Equal(node.UpToDate))
		if d.Nodes[0].State != last {
			last, since = d.Nodes[0].State, c.Now
		}
		longest = max(longest, c.Now.Sub(since))
	}
	g.Expect(longest).To(BeNumerically("<=", 2*time.Hour), "an hour, then two")
}
