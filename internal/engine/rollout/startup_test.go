// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

var (
	startup   = corev1.Taint{Key: v1alpha1.TaintStartup, Effect: corev1.TaintEffectNoSchedule}
	ofStartup = []corev1.Toleration{
		{Key: v1alpha1.TaintStartup, Operator: corev1.TolerationOpExists},
		{Key: v1alpha1.TaintStartupAutoscaler, Operator: corev1.TolerationOpExists},
	}
)

func taintsNewNodes(p *v1alpha1.GPUSharingPolicy) {
	p.Spec.Rollout.StartupTaint = v1alpha1.StartupTaintUntilReady
}

// joining is a cluster of one node that is ready under a policy, in which NVIDIA's programs tolerate the startup taint
// if the policy is one that needs it.
func joining(with ...func(*v1alpha1.GPUSharingPolicy)) *site {
	c := newSite()
	c.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy", Tolerations: []corev1.Toleration{ofNVIDIA}}
	c.add("a", sim.A100)
	p := policyOf("research", mig(count("2g", 3)), with...)
	p.CreationTimestamp = metav1.NewTime(c.Now.Add(-time.Hour))
	c.Policies = []v1alpha1.GPUSharingPolicy{p}
	c.run(60)
	return c
}

// join lets a node join, on which NVIDIA's programs come with the first tick.
func (c *site) join(name string, taints ...corev1.Taint) *host {
	h := c.add(name, sim.A100)
	h.Created, h.Taints = c.Now, taints
	h.Pods, h.Allocatable, h.plugin.running = nil, map[string]int64{}, false
	return h
}

func TestANewNodeTakesNoPodsBeforeItIsReady(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	g.Expect(c.hosts["a"].Taints).To(BeEmpty(), "it was there before")
	g.Expect(c.Plugin.Operands.Ours).To(ConsistOf(ofStartup))

	h := c.join("b")
	c.reconcile()
	g.Expect(h.Taints).To(ContainElement(startup))
	for len(h.Taints) > 0 {
		c.tick(time.Second)
		c.reconcile()
	}
	d := rollout.Decide(c.world())
	g.Expect(d.Nodes[1].State).To(Equal(node.UpToDate))
	g.Expect(advertised(h)).To(Equal(map[string]int64{"nvidia.com/mig-2g.10gb": 3}))
	g.Expect(d.Policies["research"].Nodes.Changing).To(BeZero())
	c.run(30)
	g.Expect(h.Taints).To(BeEmpty(), "and it does not come back")

	c.Policies = nil
	c.run(60)
	g.Expect(c.Plugin.Operands.Tolerations).To(Equal([]corev1.Toleration{ofNVIDIA}))
}

func TestNodesThatAreNotNewAreNotTainted(t *testing.T) {
	for name, test := range map[string]struct {
		policy func(*v1alpha1.GPUSharingPolicy)
		node   func(*host)
	}{
		"without the option":              {policy: func(*v1alpha1.GPUSharingPolicy) {}},
		"while the rollout is paused":     {policy: func(p *v1alpha1.GPUSharingPolicy) { taintsNewNodes(p); paused(p) }},
		"that were there before":          {policy: taintsNewNodes, node: func(h *host) { h.Created = h.Created.Add(-2 * time.Hour) }},
		"that offer GPUs to pods already": {policy: taintsNewNodes, node: func(h *host) { h.Allocatable["nvidia.com/gpu"] = 1 }},
		"that were ready once": {policy: taintsNewNodes, node: func(h *host) {
			h.GPU.Status.Rollout.LastGood = &v1alpha1.NodeSharing{PolicyName: "research", ConfigName: "research-old"}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := joining(taintsNewNodes)
			test.policy(&c.Policies[0])
			if name == "without the option" {
				c.Policies[0].Spec.Rollout.StartupTaint = v1alpha1.StartupTaintNone
			}
			h := c.join("b")
			if test.node != nil {
				test.node(h)
			}
			for _, a := range rollout.Decide(c.world()).Actions {
				g.Expect(a).NotTo(BeAssignableToTypeOf(action.KeepTaints{}))
			}
		})
	}
}

func TestTheTaintOfTheKubeletIsTakenOffToo(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	registered := corev1.Taint{Key: v1alpha1.TaintStartup, Value: "true", Effect: corev1.TaintEffectNoExecute}
	h := c.join("b", registered)
	c.reconcile()
	g.Expect(h.Taints).To(ContainElement(registered), "as it was registered")
	g.Expect(h.Taints).NotTo(ContainElement(startup), "one is enough")
	c.run(90)
	g.Expect(h.Taints).To(BeEmpty())
}

func TestANodeThatIsNotMadeReadyKeepsTheStartupTaint(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	c.Policies[0].Spec.Sharing = mig(count("9g", 1))
	h := c.join("b")
	c.run(60)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{startup}))
	n := rollout.Decide(c.world()).Nodes[1]
	g.Expect(n.State).To(Equal(node.Unsupported))
	g.Expect(n.Message).To(HaveSuffix("; the node keeps the taint gpusharing.io/startup:NoSchedule until it is in the desired state"))
}

func TestAStartupTaintThatNVIDIADoesNotTolerateIsNotPut(t *testing.T) {
	g := NewWithT(t)
	c := joining()
	c.Plugin.Operands.Upgrades = true
	taintsNewNodes(&c.Policies[0])
	h := c.join("b")
	c.reconcile()
	g.Expect(h.Taints).NotTo(ContainElement(startup))
	g.Expect(c.condition("research").Message).To(ContainSubstring("add {key: gpusharing.io/startup, operator: Exists} to daemonsets.tolerations of the ClusterPolicy"))

	registered := c.join("c", startup)
	registered.AgentReady = false
	c.reconcile()
	g.Expect(rollout.Decide(c.world()).Nodes[2].Message).To(ContainSubstring("add {key: gpusharing.io/startup, operator: Exists}"),
		"the node says what keeps it from becoming ready")
}

func TestANodeOfNoPolicyLosesTheStartupTaintOnceItsAgentHasReported(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes, func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"Tesla-*"}}
	})
	h := c.join("b", startup)
	devices := h.GPU.Status.Devices
	h.GPU.Status.Devices = nil
	c.carryOut(rollout.Decide(c.world()))
	g.Expect(h.Taints).To(Equal([]corev1.Taint{startup}), "the policy may govern it yet")
	h.GPU.Status.Devices = devices
	c.carryOut(rollout.Decide(c.world()))
	g.Expect(h.Taints).To(BeEmpty())
}

// The operator put the taint there itself, for a policy that is gone: `restore` waited for an agent that may never report.
func TestTheStartupTaintDoesNotOutliveTheLastPolicy(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	early := corev1.Taint{Key: v1alpha1.TaintStartupAutoscaler, Value: "unlabelled", Effect: corev1.TaintEffectNoSchedule}
	h := c.join("b", early)
	h.AgentReady = false
	c.carryOut(rollout.Decide(c.world()))
	g.Expect(h.Taints).To(ContainElement(early))
	c.Policies = nil
	c.carryOut(rollout.Decide(c.world()))
	g.Expect(h.Taints).To(BeEmpty())
}

// carryOut carries out a decision and lets no time pass.
func (c *site) carryOut(d rollout.Decision) {
	for _, a := range d.Actions {
		c.do(a)
	}
}

func TestANodeWhoseGPUsAreNotKnownYetIsTaintedForThePolicyThatAwaitsThem(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes, func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"*A100*"}}
	})
	h := c.join("b")
	h.GPU.Status.Devices = nil
	c.carryOut(rollout.Decide(c.world()))
	g.Expect(h.Taints).To(Equal([]corev1.Taint{startup}))
}
