// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestOfFortyNodesTheWorstTenAreListed: a failed one, two unsupported ones, two blocked ones, and the first of those
// that wait.
func TestOfFortyNodesTheWorstTenAreListed(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	for i := range 35 {
		c.add(fmt.Sprintf("a%02d", i), sim.A100)
	}
	for _, name := range []string{"busy", "lost"} {
		c.add(name, sim.A100)
	}
	c.hold(c.hosts["busy"], "train", 0, gpu.WholeGPU)
	c.hosts["lost"].AgentReady = false
	for _, name := range []string{"t4-1", "t4-2"} {
		c.add(name, sim.T4)
	}
	c.add("worst", sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("1g", 7)), neverEvicting, failures(2))}
	g.Expect(rollout.Decide(c.world()).Nodes).To(HaveLen(40))
	all := c.Policies[0].Spec.NodeSelector
	c.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"first": "true"}}
	c.hosts["worst"].Labels["first"] = "true"
	c.steps(2)
	c.reconcile()
	c.hosts["worst"].GPU.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonLayoutDoesNotFit,
		Message: "no room", ObservedGeneration: c.hosts["worst"].GPU.Generation,
	}}
	c.Policies[0].Spec.NodeSelector = all
	s := rollout.Decide(c.world()).Policies["research"]
	var listed []string
	for _, p := range s.Pending {
		listed = append(listed, fmt.Sprintf("%s %s (%s)", p.NodeName, p.Reason, p.State))
		g.Expect(p.Message).NotTo(BeEmpty())
	}
	g.Expect(listed).To(HaveExactElements(
		"worst LayoutDoesNotFit (Failed)", "t4-1 MIGNotSupported (Unsupported)", "t4-2 MIGNotSupported (Unsupported)",
		"busy GPUInUse (PendingDisruptive)", "lost AgentNotReporting (Unknown)",
		HavePrefix("a00 "), HavePrefix("a01 "), HavePrefix("a02 "), HavePrefix("a03 "), HavePrefix("a04 "),
	))
	g.Expect(s.Nodes).To(Equal(v1alpha1.NodeCounts{Matched: 40, Failed: 3, Waiting: 37, Blocked: 2}))
	sane(g, s, c.Policies[0].Generation)
}

// TestUpdatedNodesAreNotAllReady: a node whose device plugin has lost a replica has the configuration, and is not
// ready.
func TestUpdatedNodesAreNotAllReady(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.add("b", sim.T4)
	counts := func() v1alpha1.NodeCounts { return rollout.Decide(c.world()).Policies["research"].Nodes }
	g.Expect(counts()).To(Equal(v1alpha1.NodeCounts{Matched: 2, Waiting: 2}))
	c.run(60)
	g.Expect(counts()).To(Equal(v1alpha1.NodeCounts{Matched: 2, Ready: 2, Updated: 2}))
	h.Allocatable["nvidia.com/gpu"]--
	g.Expect(counts()).To(Equal(v1alpha1.NodeCounts{Matched: 2, Ready: 1, Waiting: 1, Updated: 2, Blocked: 1}))
}

// TestTheStrategyOfANode is that of the devices in its spec: after a roll back that of the last good state.
func TestTheStrategyOfANode(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.Policies[0].Spec.Sharing = timeSlicing(4)
	c.run(60)
	g.Expect(h.GPU.Spec.Strategy).To(Equal(v1alpha1.StrategyTimeSlicing))
	h.breaks(h.GPU.Spec.ConfigName)
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("1g", 7)), 2
	c.steps(3)
	g.Expect(h.GPU.Spec.Strategy).To(Equal(v1alpha1.StrategyMIG))
	d, _ := c.run(400)
	g.Expect(d.Nodes[0].State).To(Equal(node.Failed), d.Nodes[0].Message)
	g.Expect(h.GPU.Spec.Strategy).To(Equal(v1alpha1.StrategyTimeSlicing))
	c.Policies = nil
	c.run(60)
	g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
}

// TestANodeThatLacksAGPUAndIsBeingChangedIsNotBlocked: the change goes on for the other GPUs.
func TestANodeThatLacksAGPUAndIsBeingChangedIsNotBlocked(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100, sim.A100, sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("3g.20gb", 2)), onGPUs(0, 1))}
	c.run(300)
	c.loseGPU(h, 0)
	c.run(300)
	c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g", 7)) })
	for range 100 {
		d := c.reconcile()
		g.Expect(d.Policies["research"].Nodes.Blocked).To(BeZero(), "%s: %s", d.Nodes[0].State, d.Nodes[0].Message)
		c.tick(time.Second)
	}
	g.Expect(c.ready()).To(Equal(1))
}
