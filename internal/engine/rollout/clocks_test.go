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
