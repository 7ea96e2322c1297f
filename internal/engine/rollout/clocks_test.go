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
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAWrongClockOfANodeKeepsNoNodeFromBeingReady: its kubelet says by that clock since when a pod of NVIDIA's is Ready.
func TestAWrongClockOfANodeKeepsNoNodeFromBeingReady(t *testing.T) {
	for _, skew := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		t.Run("the device plugin, ahead by "+skew.String(), func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := c.add("a", sim.A100)
			h.skew = skew
			c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("2g", 3)))}
			d, _ := c.run(120)
			g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), d.Nodes[0].Message)
		})
		t.Run("the agent, ahead by "+skew.String(), func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := c.add("a", sim.A100)
			h.AgentSince = c.Now.Add(skew)
			h.Pods = append(h.Pods, cluster.Pod{ // its image is not there
				Namespace: "user", Name: "pulls", UID: "pulls", Controller: "ReplicaSet", GPU: true, Scheduled: c.Now.Add(-time.Hour),
			})
			c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("2g", 3)))}
			d, _ := c.run(120)
			g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), d.Nodes[0].Message)
		})
		t.Run("the DRA driver, ahead by "+skew.String(), func(t *testing.T) {
			g := NewWithT(t)
			c, h := onDRA(mig(count("1g", 7)))
			h.skew = skew
			h.restartDriver() // so that it has just started when the instances are made
			d, _ := c.run(120)
			g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
		})
	}
}

// TestAControllersClockThatWasAheadKeepsNothing: what it stamped lies in the future once its clock is right, or once
// another controller leads. A node that was in mid-change then is its users' again within the time of its stages.
func TestAControllersClockThatWasAheadKeepsNothing(t *testing.T) {
	for stage, reached := range map[string]func(*host) bool{
		"tainted":            (*host).isTainted,
		"operands stopped":   func(h *host) bool { return h.Annotations[v1alpha1.AnnotationStopped] != "" },
		"the agent is asked": func(h *host) bool { return len(h.GPU.Spec.Devices) > 0 },
	} {
		t.Run(stage, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := c.add("a", sim.A100)
			c.ahead, h.lags = 400*24*time.Hour, true
			c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("2g", 3)))}
			for range 60 {
				if !reached(h) {
					c.steps(1)
				}
			}
			g.Expect(reached(h)).To(BeTrue())
			c.ahead = 0
			c.during(2*time.Hour, time.Minute)
			g.Expect(h.isKept()).To(BeFalse(), "%v", h.Taints)
		})
	}
}

// TestAFailureOfTheFutureIsTriedAgainOnce: each request of the agent is older than such a record.
func TestAFailureOfTheFutureIsTriedAgainOnce(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	h.breaks("")
	c.ahead = 13 * time.Hour
	c.run(600)
	g.Expect(h.GPU.Status.Rollout.Failed).NotTo(BeNil())
	c.ahead, h.broken = 0, nil
	c.Policies[0].Generation++
	clear(c.writes)
	d := c.during(2*time.Hour, time.Minute)
	g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), d.Nodes[0].Message)
	g.Expect(c.writes["action.SetSpec"]).To(BeNumerically("<", 6))
}
