// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
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
	isOffered(g, h, map[string]int64{"nvidia.com/mig-2g.10gb": 3})
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

func TestAStartupTaintThatNoPolicyAsksForStaysOnlyWhereNVIDIAToleratesIt(t *testing.T) {
	g := NewWithT(t)
	c := joining()
	h := c.join("b", startup)
	c.Plugin.Operands.Tolerations = append(c.Plugin.Operands.Tolerations, ofStartup...)
	c.reconcile()
	g.Expect(h.Taints).To(ContainElement(startup))
	c.Policies[0].Spec.Taints = []v1alpha1.Taint{{Key: "example.com/shared", Effect: "NoSchedule"}} // whose toleration is being added
	c.Plugin.Operands.Tolerations = nil
	c.reconcile()
	g.Expect(h.Taints).NotTo(ContainElement(startup))
}

func TestAStartupTaintThatNoAwaitedPolicyAsksForGoes(t *testing.T) {
	g := NewWithT(t)
	c := joining(func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"*A100*"}}
	})
	h := c.join("b", startup)
	h.GPU.Status.Devices, h.AgentReady = nil, false
	c.reconcile()
	g.Expect(h.Taints).NotTo(ContainElement(startup))
}

func TestTolerationsThatAreRemovedAgainAndAgainAreHeldOff(t *testing.T) {
	g := NewWithT(t)
	c := joining()
	taintsNewNodes(&c.Policies[0])
	c.Plugin.Operands.NotBefore = c.Now.Add(time.Minute)
	g.Expect(rollout.Decide(c.world()).Tolerations).To(BeEmpty())
	g.Expect(c.condition("research").Message).To(ContainSubstring("until " + format.Clock(c.Plugin.Operands.NotBefore) + ", for another client"))
	c.Plugin.Operands.Upgrades = true
	g.Expect(c.condition("research").Message).NotTo(ContainSubstring("until "), "nothing is tried then")
	c.Plugin.Operands.Upgrades = false
	c.tick(time.Minute)
	g.Expect(rollout.Decide(c.world()).Tolerations).NotTo(BeEmpty())
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

// karpenters lets a node of the NodePool "gpu" join.
func (c *site) karpenters(name string, taints ...corev1.Taint) *host {
	h := c.join(name, taints...)
	h.Labels[cluster.LabelNodePool] = "gpu"
	return h
}

// TestKarpentersNodesGetNoTaintThatKarpenterDoesNotKnow: Karpenter v1.14.1 started 10 nodes in 60 seconds for one pod
// while each new node was given a taint that its NodePool did not list.
func TestKarpentersNodesGetNoTaintThatKarpenterDoesNotKnow(t *testing.T) {
	for name, mark := range map[string]func(*host){
		"with its labels": func(h *host) { h.Labels[cluster.LabelNodePool] = "gpu" },
		"before it has labelled": func(h *host) {
			h.Taints = append(h.Taints, corev1.Taint{Key: "karpenter.sh/unregistered", Effect: "NoExecute"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := joining(taintsNewNodes)
			h := c.join("b")
			mark(h)
			had := len(h.Taints)
			for i := range 90 {
				c.reconcile()
				g.Expect(h.Taints).To(HaveLen(had))
				c.tick(time.Second)
				if i == 5 && had > 0 {
					h.Taints, had = nil, 0
					h.Labels[cluster.LabelNodePool] = "gpu"
				}
			}
			g.Expect(advertised(h)).To(Equal(map[string]int64{"nvidia.com/mig-2g.10gb": 3}), "it becomes ready all the same")
		})
	}
}

func TestAPolicyNamesTheNodePoolThatLacksTheStartupTaint(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	c.karpenters("b")
	c.karpenters("c")
	c.NodePools = map[string]cluster.NodePool{"gpu": {StartupTaints: []string{"example.com/other"}}, "idle": {}}
	c.run(90)
	condition := c.condition("research")
	g.Expect(condition.Status).To(Equal(metav1.ConditionFalse), "also once all nodes are ready")
	g.Expect(condition.Reason).To(Equal(v1alpha1.ReasonStartupTaintMissing))
	g.Expect(condition.Message).To(Equal("NodePool gpu of Karpenter lacks the startup taint, so pods may start before a node is ready. Add "+
		"startupTaints: [{key: gpusharing.io/startup, effect: NoSchedule}], which replaces all its nodes"), "and of no other NodePool")
	g.Expect(rollout.Decide(c.world()).Policies["research"].Nodes.Ready).To(BeEquivalentTo(3), "the nodes are as desired")

	c.NodePools["gpu"] = cluster.NodePool{StartupTaints: []string{v1alpha1.TaintStartup}}
	g.Expect(c.condition("research").Reason).To(Equal(v1alpha1.ReasonTaintsPresent))
}

func TestTheStartupTaintThatKarpenterPutsIsTakenOffOnceTheNodeIsReady(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	h := c.karpenters("b", startup)
	c.reconcile()
	g.Expect(h.Taints).To(Equal([]corev1.Taint{startup}))
	for range 90 {
		c.tick(time.Second)
		c.reconcile()
		g.Expect(h.Taints).NotTo(ContainElement(HaveField("Key", v1alpha1.TaintChanging)), "the NodePool does not list that one")
	}
	g.Expect(h.Taints).To(BeEmpty())
	isOffered(g, h, map[string]int64{"nvidia.com/mig-2g.10gb": 3})
}

// TestTheStartupTaintHasTheKeyThatTheAutoscalerOfTheNodeIgnores: one taint for each node, chosen by what made it.
func TestTheStartupTaintHasTheKeyThatTheAutoscalerOfTheNodeIgnores(t *testing.T) {
	for name, test := range map[string]struct {
		labels, annotations map[string]string
		key                 string
	}{
		"a machine of Cluster API": {annotations: map[string]string{"cluster.x-k8s.io/machine": "gpu-1"}, key: v1alpha1.TaintStartupAutoscaler},
		"a machine of OpenShift":   {annotations: map[string]string{cluster.AnnotationMachine: "openshift-machine-api/gpu-1"}, key: v1alpha1.TaintStartupAutoscaler},
		"EKS":                      {labels: map[string]string{"eks.amazonaws.com/nodegroup": "gpu"}, key: v1alpha1.TaintStartupAutoscaler},
		"GKE":                      {labels: map[string]string{"cloud.google.com/gke-nodepool": "gpu"}, key: v1alpha1.TaintStartupAutoscaler},
		"AKS":                      {labels: map[string]string{"kubernetes.azure.com/agentpool": "gpu"}, key: v1alpha1.TaintStartupAutoscaler},
		"Karpenter with the flag":  {labels: map[string]string{cluster.LabelNodePool: "gpu"}, key: v1alpha1.TaintStartupReadiness},
		"nothing known":            {key: v1alpha1.TaintStartup},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := joining()
			c.ReadinessTaint = true
			taintsNewNodes(&c.Policies[0])
			c.run(10) // NVIDIA's programs get the tolerations
			h := c.join("b")
			maps.Copy(h.Labels, test.labels)
			if h.Annotations == nil {
				h.Annotations = map[string]string{}
			}
			maps.Copy(h.Annotations, test.annotations)
			c.reconcile()
			want := corev1.Taint{Key: test.key, Effect: corev1.TaintEffectNoSchedule}
			g.Expect(h.Taints).To(ContainElement(want))
			g.Expect(c.condition("research").Message).To(ContainSubstring(test.key))
			c.run(90)
			g.Expect(h.Taints).To(BeEmpty())
			isOffered(g, h, map[string]int64{"nvidia.com/mig-2g.10gb": 3})
		})
	}
}

// TestAStartupTaintInAMachineSetIsNamed: OpenShift's node-link controller adds each taint of the Machine again
// (openshift/machine-api-operator, pkg/controller/nodelink).
func TestAStartupTaintInAMachineSetIsNamed(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	c.Repeats = &action.Repeats{}
	h := c.join("b")
	h.Annotations = map[string]string{cluster.AnnotationMachine: "openshift-machine-api/gpu-1"}
	c.run(90)
	clear(c.writes)
	for range 300 {
		h.Taints = []corev1.Taint{startup}
		for _, a := range c.memory.decide(c.world()).Actions {
			c.do(a)
			c.Repeats.Note(a, c.Now)
		}
		c.tick(time.Second)
	}
	h.Taints = []corev1.Taint{startup}
	g.Expect(c.writes["action.KeepTaints"]).To(BeNumerically("<=", 16), "it is no fight without end")
	condition := c.condition("research")
	g.Expect(condition.Reason).To(Equal(v1alpha1.ReasonStartupTaintInMachineSet))
	g.Expect(condition.Message).To(And(ContainSubstring("MachineSet of Machine openshift-machine-api/gpu-1"), ContainSubstring("gpusharing.io/startup:NoSchedule")))
}

// TestAChangeOfAKarpenterNodeThatPodsUseIsDrainedUnderTheTaint: without the taint only a change begins that nothing
// blocks.
func TestAChangeOfAKarpenterNodeThatPodsUseIsDrainedUnderTheTaint(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	h := c.karpenters("b")
	c.run(90)
	h.Labels["karpenter.sh/initialized"] = "true"
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("1g", 7)), 2
	for range 10 {
		c.reconcile()
		if h.Taints != nil {
			break
		}
		c.tick(time.Second)
	}
	g.Expect(h.Taints).To(ContainElement(HaveField("Key", v1alpha1.TaintChanging)))
}

// TestANewKarpenterNodeThatWaitedForItsDriverGetsNoTaint: NVIDIA's driver takes minutes to start on a new node, and a
// policy may say that drains are to be short. Karpenter starts another node for one that is not initialized and has
// this taint, and so on.
func TestANewKarpenterNodeThatWaitedForItsDriverGetsNoTaint(t *testing.T) {
	for name, test := range map[string]struct {
		drain  int32 // seconds; 0: the default
		driver time.Duration
	}{
		"a short drain":  {drain: 60, driver: 2 * time.Minute},
		"a slow driver":  {driver: 11 * time.Minute},
		"at their usual": {driver: 4 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := joining(taintsNewNodes, func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Drain.TimeoutSeconds = test.drain })
			h := c.karpenters("b")
			h.AgentReady = false
			for end := c.Now.Add(test.driver); c.Now.Before(end); c.tick(10 * time.Second) {
				c.reconcile()
			}
			h.AgentReady = true
			for range 120 {
				c.reconcile()
				g.Expect(h.Taints).NotTo(ContainElement(HaveField("Key", v1alpha1.TaintChanging)), "at %s after it joined", c.Now.Sub(h.Created))
				c.tick(time.Second)
			}
			isOffered(g, h, map[string]int64{"nvidia.com/mig-2g.10gb": 3})
		})
	}
}

// TestNewKarpenterNodesThatWaitForTheBudgetGetNoTaint: many nodes join at once, and by default one changes at a time.
func TestNewKarpenterNodesThatWaitForTheBudgetGetNoTaint(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	hosts := map[string]*host{}
	for _, name := range []string{"b", "c"} {
		hosts[name] = c.karpenters(name)
	}
	for second := range 1200 {
		hosts["b"].lags = second < 12*60 // as long as ten nodes before this one take
		c.reconcile()
		g.Expect(hosts["c"].Taints).NotTo(ContainElement(HaveField("Key", v1alpha1.TaintChanging)), "at %s after it joined", c.Now.Sub(hosts["c"].Created))
		c.tick(time.Second)
	}
}

// TestAChangeWithoutTheTaintHasADeadline: also if nothing else happens on the node, and if the policy lets drains take
// long.
func TestAChangeWithoutTheTaintHasADeadline(t *testing.T) {
	for _, drain := range []int32{0, 3600} {
		g := NewWithT(t)
		c := joining(taintsNewNodes, func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Drain.TimeoutSeconds = drain })
		h := c.karpenters("b")
		c.reconcile()
		for h.Labels[pluginLabel] == "true" {
			c.tick(time.Second)
			c.reconcile()
		}
		h.Pods = append(h.Pods, cluster.Pod{
			Namespace: "gpu-operator", Name: "stuck", UID: "stuck", Controller: "DaemonSet", NVIDIA: true,
			NodeSelector: map[string]string{pluginLabel: "true"},
		})
		stopped := c.Now
		d := rollout.Decide(c.world())
		for len(changes(d.Actions)) == 0 {
			for _, a := range d.Actions {
				c.do(a)
			}
			g.Expect(d.Nodes[1].State).To(Equal(node.StoppingOperands), "%+v", d.Nodes[1])
			g.Expect(d.After).To(BeNumerically(">", 0))
			c.Now = c.Now.Add(d.After)
			d = rollout.Decide(c.world())
		}
		g.Expect(d.Actions).To(ContainElement(HaveField("Why", "recording that the change failed")), "after %s", c.Now.Sub(stopped))
		g.Expect(c.Now).To(BeTemporally("~", stopped.Add(5*time.Minute), time.Minute), "whatever the time for draining")
	}
}

// TestANewKarpenterNodeWaitsForNoWindow: a node that is not in service yet waits for none, whichever autoscaler made
// it.
func TestANewKarpenterNodeWaitsForNoWindow(t *testing.T) {
	for name, mark := range map[string]func(*host){
		"of nobody":    func(*host) {},
		"of Karpenter": func(h *host) { h.Labels[cluster.LabelNodePool] = "gpu" },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := joining(taintsNewNodes)
			inWindows(tonight)(&c.Policies[0])
			c.Policies[0].Generation++
			c.at("2027-03-01T12:00:00Z")
			c.run(10)
			h := c.join("b")
			mark(h)
			c.run(120)
			g.Expect(advertised(h)).To(Equal(map[string]int64{"nvidia.com/mig-2g.10gb": 3}), "%+v", rollout.Decide(c.world()).Policies["research"].Pending)
		})
	}
}

// TestAStartupTaintThatANodePoolListsIsToleratedAndTakenOff: without the flag the operator puts no such taint on a
// node, but Karpenter does.
func TestAStartupTaintThatANodePoolListsIsToleratedAndTakenOff(t *testing.T) {
	for _, key := range []string{v1alpha1.TaintStartup, v1alpha1.TaintStartupAutoscaler, v1alpha1.TaintStartupReadiness} {
		g := NewWithT(t)
		c := joining(taintsNewNodes)
		c.NodePools = map[string]cluster.NodePool{"gpu": {StartupTaints: []string{key}}}
		h := c.karpenters("b", corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule})
		c.run(120)
		g.Expect(h.Taints).To(BeEmpty(), "%s: %s", key, c.condition("research").Message)
		isOffered(g, h, map[string]int64{"nvidia.com/mig-2g.10gb": 3})
	}
}

// TestAFightOverAnotherTaintIsNotBlamedOnTheMachineSet: the startup taint of the node is wanted, and nobody puts it
// back.
func TestAFightOverAnotherTaintIsNotBlamedOnTheMachineSet(t *testing.T) {
	g := NewWithT(t)
	taint := v1alpha1.Taint{Key: "example.com/shared-gpu", Effect: "NoSchedule"}
	c := joining(taintsNewNodes, func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Taints = []v1alpha1.Taint{taint} })
	c.Repeats = &action.Repeats{}
	h := c.join("b", startup)
	h.Annotations = map[string]string{cluster.AnnotationMachine: "openshift-machine-api/gpu-1"}
	h.AgentReady = false
	for range 60 {
		h.Taints = slices.DeleteFunc(slices.Clone(h.Taints), func(t corev1.Taint) bool { return t.Key == taint.Key })
		for _, a := range c.memory.decide(c.world()).Actions {
			c.do(a)
			c.Repeats.Note(a, c.Now)
		}
		c.tick(time.Second)
	}
	g.Expect(h.Taints).To(ContainElement(HaveField("Key", v1alpha1.TaintStartupAutoscaler)), "the one that the autoscaler of the node waits for")
	g.Expect(c.condition("research").Reason).To(Equal(v1alpha1.ReasonChangedByOthers), c.condition("research").Message)
}

// TestTaintsOfThePolicyFollowOnceKarpenterHasInitializedTheNode: before that Karpenter takes a node with such a taint
// for one without room.
func TestTaintsOfThePolicyFollowOnceKarpenterHasInitializedTheNode(t *testing.T) {
	g := NewWithT(t)
	c := joining(func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Taints = []v1alpha1.Taint{{Key: "nvidia.com/gpu", Effect: v1alpha1.TaintEffectNoSchedule}}
	})
	h := c.karpenters("b")
	for range 90 {
		c.reconcile()
		g.Expect(h.Taints).To(BeEmpty())
		c.tick(time.Second)
	}
	condition := c.condition("research")
	g.Expect(condition.Reason).To(Equal(v1alpha1.ReasonNodeNotInitialized), condition.Message)
	g.Expect(condition.Message).To(ContainSubstring("Node b"))
	h.Labels["karpenter.sh/initialized"] = "true"
	c.run(5)
	g.Expect(h.Taints).To(HaveLen(1))
	g.Expect(c.condition("research").Reason).To(Equal(v1alpha1.ReasonTaintsPresent))
	delete(h.Labels, "karpenter.sh/initialized")
	c.run(5)
	g.Expect(h.Taints).To(HaveLen(1), "what is there stays")
}

// TestTheStartupTaintOfANodeThatTellsItsGroupLater: Cluster API's Machine controller annotates a Node after it has joined. Until then the
// operator puts gpusharing.io/startup on it, for which Cluster Autoscaler does not wait: it started six nodes for one pod.
func TestTheStartupTaintOfANodeThatTellsItsGroupLater(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	h := c.join("b")
	c.reconcile()
	g.Expect(h.Taints).To(ContainElement(HaveField("Key", v1alpha1.TaintStartup)))
	h.Annotations = map[string]string{"cluster.x-k8s.io/machine": "gpu-1"}
	c.reconcile()
	g.Expect(h.Taints).To(And(ContainElement(HaveField("Key", v1alpha1.TaintStartupAutoscaler)), Not(ContainElement(HaveField("Key", v1alpha1.TaintStartup)))))
	c.run(120)
	g.Expect(h.Taints).To(BeEmpty())
	isOffered(g, h, map[string]int64{"nvidia.com/mig-2g.10gb": 3})
}
