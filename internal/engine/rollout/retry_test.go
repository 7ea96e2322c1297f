// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
)

// retryA is what a user runs so that node a is tried again.
const retryA = "kubectl annotate gpunode a --overwrite gpusharing.io/retry=$(date +%s)"

// TestAFailedNodeIsTriedAgain when something changed that a user did for that, and never by itself.
func TestAFailedNodeIsTriedAgain(t *testing.T) {
	for name, again := range map[string]func(*site, *host){
		"when any field of the policy is edited": func(c *site, _ *host) {
			c.Policies[0].Spec.Rollout.Drain.TimeoutSeconds = 900
			c.Policies[0].Generation++
		},
		"when the policy is created anew": func(c *site, _ *host) { c.Policies[0].UID = "another" },
		"when the GPUNode is annotated":   func(_ *site, h *host) { h.annotate(v1alpha1.AnnotationRetry, "1") },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := slicing()
			h.breaks("")
			c.run(600)
			h.broken = nil
			d := c.during(2*time.Hour, time.Minute)
			g.Expect(d.Nodes[0].State).To(Equal(node.Failed), "not by itself")
			g.Expect(d.Nodes[0].Message).To(HaveSuffix("restart the kubelet; rolled back; retry by gpusharing.io/retry"))
			again(c, h)
			d, _ = c.run(60)
			g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), d.Nodes[0].Message)
			g.Expect(h.GPU.Status.Rollout.Failed).To(BeNil())
		})
	}
}

// TestANodeThatFailsAgainIsTriedOnce for each change.
func TestANodeThatFailsAgainIsTriedOnce(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	h.breaks("")
	c.run(600)
	h.annotate(v1alpha1.AnnotationRetry, "1")
	d, states := c.run(600)
	g.Expect(states["a"]).To(ContainElement(node.Verifying))
	g.Expect(d.Nodes[0].State).To(Equal(node.Failed))
	clear(c.writes)
	c.during(2*time.Hour, time.Minute)
	g.Expect(c.writes).To(BeEmpty())
}

// TestAnotherAttemptHasItsOwnTimeToAdvertise: a rollout that was paused before it rolled a failed change back still
// selects the config, for longer than a node may take to advertise it.
func TestAnotherAttemptHasItsOwnTimeToAdvertise(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	h.breaks("")
	for h.Labels[v1alpha1.LabelConfig] == "" {
		c.steps(1)
	}
	c.Policies[0].Spec.Rollout.Paused, c.Policies[0].Generation = true, 2
	d := c.during(20*time.Minute, 10*time.Second)
	g.Expect(d.Nodes[0].State).To(Equal(node.Failed), d.Nodes[0].Message)
	g.Expect(h.Labels[v1alpha1.LabelConfig]).NotTo(BeEmpty(), "it is not rolled back")

	c.Policies[0].Spec.Rollout.Paused, c.Policies[0].Generation = false, 3
	d = c.during(time.Minute, time.Second)
	g.Expect(d.Nodes[0].State).To(Equal(node.Verifying), d.Nodes[0].Message)
	h.broken = nil
	d = c.during(5*time.Minute, time.Second)
	g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), d.Nodes[0].Message)
	g.Expect(h.GPU.Status.Rollout.Failed).To(BeNil())
}
