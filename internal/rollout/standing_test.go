// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// TestOfFortyNodesTheWorstTenAreListed: a failed one, two unsupported ones, two blocked ones, and the first of those that wait.
func TestOfFortyNodesTheWorstTenAreListed(t *testing.T) {
	g := NewWithT(t)
	c := newCluster()
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
	c.pass()
	c.hosts["worst"].GPU.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionStalled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonLayoutDoesNotFit,
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
		"worst LayoutDoesNotFit (Failed)", "t4-1 MIGNotSupported (Impossible)", "t4-2 MIGNotSupported (Impossible)",
		"busy GPUInUse (StaleDisruptive)", "lost AgentNotReporting (Undiscovered)",
		HavePrefix("a00 "), HavePrefix("a01 "), HavePrefix("a02 "), HavePrefix("a03 "), HavePrefix("a04 "),
	))
	g.Expect(s.Nodes).To(Equal(v1alpha1.NodeCounts{Matched: 40, Failed: 3, Waiting: 37}))
	sane(g, s, c.Policies[0].Generation)
}
