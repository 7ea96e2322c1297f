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
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

var (
	ofNVIDIA = corev1.Toleration{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	ofShared = corev1.Toleration{Key: "example.com/shared", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	shared   = corev1.Taint{Key: "example.com/shared", Value: "a", Effect: corev1.TaintEffectNoSchedule}
	native   = corev1.Taint{Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoSchedule}
)

func tainting(taints ...corev1.Taint) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Taints = nil
		for _, t := range taints {
			p.Spec.Taints = append(p.Spec.Taints, v1alpha1.Taint{Key: t.Key, Value: t.Value, Effect: v1alpha1.TaintEffect(t.Effect)})
		}
	}
}

// tainted is a cluster of one node under a policy with taints. NVIDIA's operator runs neither driver nor toolkit.
func tainted(taints ...corev1.Taint) (*site, *host) {
	c := newSite()
	c.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy", Tolerations: []corev1.Toleration{ofNVIDIA}}
	h := c.add("a", sim.T4)
	c.setPolicy("research", timeSlicing(4), tainting(taints...))
	return c, h
}

func (c *site) condition(policy string) metav1.Condition {
	found, _ := condition.Find(rollout.Decide(c.world()).Policies[policy].Conditions, v1alpha1.ConditionTainted)
	return found
}

func TestATaintThatNVIDIATolerates(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(native)
	theirs := corev1.Taint{Key: "team", Value: "x", Effect: corev1.TaintEffectNoSchedule}
	h.Taints = []corev1.Taint{theirs}
	c.run(60)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{theirs, native}))
	g.Expect(h.Annotations).To(HaveKeyWithValue(v1alpha1.AnnotationTaints, "nvidia.com/gpu:NoSchedule"))
	g.Expect(c.condition("research")).To(And(HaveField("Status", metav1.ConditionTrue), HaveField("Reason", v1alpha1.ReasonTaintsPresent),
		HaveField("Message", "The nodes of the policy have its taints: nvidia.com/gpu:NoSchedule")))
	g.Expect(c.Plugin.Operands.Ours).To(BeEmpty(), "NVIDIA's own toleration does")

	h.Taints = []corev1.Taint{theirs}
	c.run(5)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{theirs, native}), "set again when a user removed it")

	c.Policies[0].Generation = 2
	tainting(corev1.Taint{Key: "nvidia.com/gpu", Value: "shared", Effect: corev1.TaintEffectNoSchedule})(&c.Policies[0])
	c.run(5)
	g.Expect(h.Taints[1].Value).To(Equal("shared"), "edited")

	tainting()(&c.Policies[0])
	c.run(5)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{theirs}))
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationTaints))
	g.Expect(c.condition("research").Type).To(BeEmpty(), "a policy without taints says nothing of them")
}

// TestATaintThatAnotherControllerRemovesIsNotReportedAsThere: the operator does not write it without end, and says so.
func TestATaintThatAnotherControllerRemovesIsNotReportedAsThere(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(native)
	c.Repeats = &action.Repeats{}
	var d rollout.Decision
	for range 60 {
		d = c.memory.decide(c.world())
		for _, a := range d.Actions {
			c.do(a)
			c.Repeats.Note(a, c.Now)
		}
		h.Taints = nil
		c.version[h.Name]++
		c.tick(time.Second)
	}
	found, _ := condition.Find(d.Policies["research"].Conditions, v1alpha1.ConditionTainted)
	g.Expect(found).To(And(HaveField("Status", metav1.ConditionFalse), HaveField("Reason", v1alpha1.ReasonChangedByOthers),
		HaveField("Message", ContainSubstring("Node a: Another controller undoes"))))
}

func TestATaintThatWasThereStays(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(native)
	h.Taints = []corev1.Taint{native}
	c.run(60)
	g.Expect(c.condition("research").Status).To(Equal(metav1.ConditionTrue))
	c.Policies = nil
	d, _ := c.run(60)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{native}))
	g.Expect(d.Nodes).To(BeEmpty())

	c, h = tainted(native)
	h.Taints = []corev1.Taint{{Key: "nvidia.com/gpu", Value: "mine", Effect: corev1.TaintEffectNoSchedule}}
	c.run(60)
	g.Expect(h.Taints[0].Value).To(Equal("mine"))
	g.Expect(c.condition("research")).To(And(HaveField("Reason", v1alpha1.ReasonTaintConflict), HaveField("Message",
		"Node a: a user or another controller has put the taint nvidia.com/gpu=mine:NoSchedule on the node, which takes the place of "+
			"nvidia.com/gpu:NoSchedule; remove theirs, or this one from the policy")))
}

func TestOfTwoPoliciesTheGoverningOnesTaintsAreKept(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(native)
	c.run(60)
	prefer := corev1.Taint{Key: "example.com/other", Effect: corev1.TaintEffectPreferNoSchedule}
	c.Policies = append(c.Policies, policyOf("better", timeSlicing(2), tainting(prefer), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Priority = 1 }))
	c.run(60)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{prefer}), "and a preference needs no toleration")
	g.Expect(c.Plugin.Operands.Ours).To(BeEmpty())
}

// TestTolerationsComeBeforeTaintsAndGoAfterThem watches the order: at no time has a node a taint under which NVIDIA's
// pods could not come back.
func TestTolerationsComeBeforeTaintsAndGoAfterThem(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(shared)
	said := map[string]bool{}
	watch := func(reconciles int) {
		for range reconciles {
			said[c.condition("research").Reason] = true
			c.reconcile()
			g.Expect(c.keptOff(h)).To(BeFalse())
			c.tick(time.Second)
		}
	}
	watch(30)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{shared}))
	g.Expect(c.Plugin.Operands.Tolerations).To(Equal([]corev1.Toleration{ofNVIDIA, ofShared}))
	g.Expect(said).To(HaveKey(v1alpha1.ReasonTolerationsChanging))
	g.Expect(said).To(HaveKey(v1alpha1.ReasonTaintsPresent))
	isOffered(g, h, gpusOnly(4))

	c.Policies = nil
	watch(60)
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(c.Plugin.Operands.Tolerations).To(Equal([]corev1.Toleration{ofNVIDIA}))
	g.Expect(rollout.Decide(c.world()).Nodes).To(BeEmpty())
}

// TestATolerationStaysWhileATaintNeedsIt: another controller has removed the record of the operator's taints, so the
// taint is not the operator's to take off. Without its toleration NVIDIA's device plugin could not come back to the
// node.
func TestATolerationStaysWhileATaintNeedsIt(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(shared)
	c.run(30)
	delete(h.Annotations, v1alpha1.AnnotationTaints)
	c.edit(tainting())
	for range 30 {
		c.reconcile()
		g.Expect(c.keptOff(h)).To(BeFalse())
		c.tick(time.Second)
	}
	g.Expect(h.Taints).To(Equal([]corev1.Taint{shared}))
	isOffered(g, h, gpusOnly(4))

	c.Policies = nil
	for range 60 {
		c.reconcile()
		g.Expect(c.keptOff(h)).To(BeFalse())
		c.tick(time.Second)
	}
	g.Expect(h.GPU.Spec.Baseline).To(BeNil(), "the node is released")
	isOffered(g, h, gpusOnly(1))

	h.Taints = nil
	c.run(30)
	g.Expect(c.Plugin.Operands.Tolerations).To(Equal([]corev1.Toleration{ofNVIDIA}), "it goes with the taint")
}

// TestTolerationsAreNotAddedWhereThatHurts: what would restart the driver, or fail what runs, is left to the user, who
// is told what to add.
func TestTolerationsAreNotAddedWhereThatHurts(t *testing.T) {
	for name, test := range map[string]struct {
		operands clusterpolicy.Operands
		mps      bool
		users    bool // pods hold GPUs
		claims   bool // by ResourceClaims
		since    string
	}{
		"NVIDIA's operator upgrades the driver": {
			operands: clusterpolicy.Operands{Driver: true, Upgrades: true}, since: "it would upgrade NVIDIA's driver on every node",
		},
		"the container toolkit, while pods hold GPUs": {
			operands: clusterpolicy.Operands{Toolkit: true}, users: true, since: "it could fail GPU pods, now pod user/train",
		},
		"the container toolkit, while pods have GPUs by claims": {
			operands: clusterpolicy.Operands{Toolkit: true}, claims: true, since: "it could fail GPU pods, now pod user/train",
		},
		"NVIDIA's MPS daemons, while pods hold GPUs": {mps: true, users: true, since: "it would end clients of NVIDIA's MPS, now pod user/train"},
		"who wrote the list after us":                {operands: clusterpolicy.Operands{Taken: "helm"}, since: `field manager "helm" wrote that list since`},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := tainted(shared)
			test.operands.Name, test.operands.Tolerations = "cluster-policy", []corev1.Toleration{ofNVIDIA}
			c.Plugin.Operands = &test.operands
			if test.users {
				c.hold(h, "train", 0, gpu.WholeGPU)
			}
			if test.claims {
				h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: "train", UID: "train", Claim: "user/one-gpu"})
			}
			if test.mps {
				h.Pods = append(h.Pods, cluster.Pod{Name: "mps", NVIDIA: true, NodeSelector: map[string]string{mpsLabel: "true"}})
			}
			c.reconcile()
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(c.Plugin.Operands.Tolerations).To(Equal([]corev1.Toleration{ofNVIDIA}))
			g.Expect(c.condition("research")).To(And(HaveField("Reason", v1alpha1.ReasonTolerationMissing), HaveField("Message", "Toleration not added: "+test.since+
				"; add {key: example.com/shared, operator: Exists, effect: NoSchedule} to daemonsets.tolerations of the ClusterPolicy")))

			o := *c.Plugin.Operands
			o.Tolerations = append(o.Tolerations, ofShared)
			c.Plugin.Operands = &o // the user does it
			c.run(30)
			g.Expect(h.Taints).To(Equal([]corev1.Taint{shared}))
			c.Policies = nil
			c.run(60)
			g.Expect(c.Plugin.Operands.Tolerations).To(ContainElement(ofShared), "what the user added stays")
		})
	}
}

func TestTheDriversPodsTakeATolerationOverLater(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(shared)
	c.Plugin.Operands.Driver = true
	h.Pods = append(h.Pods, cluster.Pod{
		Name: "driver", UID: "driver", Serves: true, Controller: "DaemonSet", NVIDIA: true,
		NodeSelector: map[string]string{"nvidia.com/gpu.deploy.driver": "true"}, Tolerations: []corev1.Toleration{ofNVIDIA},
	})
	c.run(30)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{shared}))
}

func TestAPodThatDoesNotTolerateATaintKeepsItOff(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(native)
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "nfd", Name: "worker", UID: "worker", Serves: true, Controller: "DaemonSet"})
	c.run(30)
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(c.condition("research")).To(And(HaveField("Reason", v1alpha1.ReasonTolerationsChanging),
		HaveField("Message", Equal("Node a: Waiting for nfd/worker to tolerate nvidia.com/gpu:NoSchedule; if not NVIDIA's, "+
			"add {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule} (Helm: node-feature-discovery.worker.tolerations)"))))
}

// TestATaintGoesWithItsToleration: when a user takes the toleration back, the taint goes too, before NVIDIA's pods are
// replaced and cannot come back.
func TestATaintGoesWithItsToleration(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(shared)
	c.run(30)
	o := *c.Plugin.Operands
	o.Tolerations, o.Ours, o.Taken = []corev1.Toleration{ofNVIDIA}, nil, "helm"
	c.Plugin.Operands = &o
	c.reconcile()
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(c.condition("research").Reason).To(Equal(v1alpha1.ReasonTolerationMissing))
	c.run(30)
	isOffered(g, h, gpusOnly(4))
}

func TestAStandAlonePluginIsItsOwnersToChange(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(shared)
	c.Plugin.ClusterPolicy, c.Plugin.Operands = false, nil
	for i := range h.Pods {
		h.Pods[i].NodeSelector, h.Pods[i].Tolerations = nil, nil
	}
	h.Pods = h.Pods[:1]
	c.reconcile()
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(c.condition("research").Message).To(Equal("NVIDIA's device plugin lacks a toleration; " +
		"add {key: example.com/shared, operator: Exists, effect: NoSchedule} to the DaemonSet of pod gpu-operator/nvidia-1 (Helm: tolerations)"))
	h.Pods[0].Tolerations = []corev1.Toleration{ofShared}
	c.reconcile()
	g.Expect(h.Taints).To(Equal([]corev1.Taint{shared}))
}

func TestAPausedPolicyChangesNoTaint(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(native)
	paused(&c.Policies[0])
	c.run(5)
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(c.condition("research").Reason).To(Equal(v1alpha1.ReasonPaused))

	tainting(shared)(&c.Policies[0])
	g.Expect(c.condition("research")).To(And(HaveField("Reason", v1alpha1.ReasonPaused), HaveField("Message",
		"The toleration of example.com/shared:NoSchedule is to be added to ClusterPolicy cluster-policy first, which replaces the "+
			"pods of NVIDIA's programs node by node")))
	c.Plugin.Reason, c.Plugin.Message = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy"
	g.Expect(c.condition("research")).To(And(HaveField("Reason", v1alpha1.ReasonNoDevicePlugin), HaveField("Message", "There is no ClusterPolicy")))
}

func TestWithoutADevicePluginTaintsStayAndGoWithTheirPolicy(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(native)
	c.run(60)
	c.Plugin.Reason, c.Plugin.Message = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy"
	c.reconcile()
	g.Expect(h.Taints).To(Equal([]corev1.Taint{native}))
	c.Policies = nil
	c.reconcile()
	g.Expect(h.Taints).To(BeEmpty())
}

func TestRetainKeepsTheTaints(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(shared)
	retaining(&c.Policies[0])
	c.run(60)
	c.Policies = nil
	c.run(60)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{shared}))
	g.Expect(c.Plugin.Operands.Ours).To(Equal([]corev1.Toleration{ofShared}))
}

// TestAStandAlonePluginThatRestartsIsStillThere beside NVIDIA's DRA driver, of which nobody asks what it tolerates then. It
// has left once the kubelet no longer lists its devices.
func TestAStandAlonePluginThatRestartsIsStillThere(t *testing.T) {
	g := NewWithT(t)
	c, h := standAlone()
	c.offersClaims()
	h.Pods[0].Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "nvidia-dra", Name: "dra", UID: "dra", Controller: "DaemonSet", DRA: true, Scheduled: c.Now})
	apart := corev1.Taint{Key: "team", Value: "ml", Effect: corev1.TaintEffectNoSchedule}
	c.setPolicy("research", mig(count("1g", 7)), evicting, tainting(apart))
	d, _ := c.run(20)
	hasReason(g, d, v1alpha1.ReasonDRADriverActive)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{apart}))

	h.Pods = h.Pods[1:]
	c.tick(time.Second)
	g.Expect(h.Unallocatable).To(HaveKey("nvidia.com/gpu"))
	d = c.reconcile()
	hasReason(g, d, v1alpha1.ReasonDRADriverActive)
	g.Expect(h.Taints).To(Equal([]corev1.Taint{apart}))
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	c.tick(keepsCapacity)
	g.Expect(one(c.reconcile()).Reason).NotTo(Equal(v1alpha1.ReasonDRADriverActive))
}

// TestATaintStaysWhileAStandAlonePluginHasNoPod, as while its DaemonSet replaces it, and goes once a pod is there that
// does not tolerate it.
func TestATaintStaysWhileAStandAlonePluginHasNoPod(t *testing.T) {
	g := NewWithT(t)
	c, h := standAlone()
	h.Pods[0].Tolerations, h.Pods[0].Serves = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, true
	apart := corev1.Taint{Key: "team", Value: "ml", Effect: corev1.TaintEffectNoSchedule}
	c.setPolicy("research", timeSlicing(4), tainting(apart))
	c.run(100)
	g.Expect(h.Taints).To(HaveLen(1))

	h.Pods[0].Terminating = true
	c.reconcile()
	g.Expect(h.Taints).To(HaveLen(1))
	pod := h.Pods[0]
	h.Pods = h.Pods[1:]
	c.reconcile()
	g.Expect(h.Taints).To(HaveLen(1))

	pod.Terminating, pod.Tolerations = false, nil
	h.Pods = append(h.Pods, pod)
	c.reconcile()
	g.Expect(h.Taints).To(BeEmpty())
}
