// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
)

func TestRollout(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	for name, test := range map[string]func(*scenario){
		"time-slicing is keys, then the ClusterPolicy, then a label, each once":  testTimeSlicing,
		"an edit is one write of the keys and one of the node":                   testEdit,
		"of two policies for a node one governs it, and the other is told so":    testConflict,
		"without a policy everything is as it was":                               testUndo,
		"a policy that changed meanwhile does nothing disruptive any more":       testOutdated,
		"a node that changed meanwhile keeps what others put on it":              testTaintsOfOthers,
		"a MIG change evicts the holder, and a budget holds it up":               testEviction,
		"who keeps a node from going back is named, though no policy is left":    testRestoreInUse,
		"a taint comes after its toleration, is kept, and goes before it":        testPolicyTaints,
		"a cluster without a device plugin is told apart from one that has none": testUnsupported,
		"a GPUNode that went with its node is not created again":                 testGone,
		"a pod that took another's place is neither synced nor deleted":          testPodTookPlace,
		"a paused policy says what would be done, and nothing is":                testPaused,
		"who changes the ClusterPolicy back is named, and not fought":            testOverridden,
		"a pod under two budgets is named in an Event":                           testTwoBudgets,
		"a node is rebooted once its other pods have left it, as a policy says":  testEmptied,
		"the DaemonSet of NVIDIA's DRA driver keeps its nodes":                   testDRADaemonSet,
	} {
		t.Run(name, func(t *testing.T) { test(newScenario(t, cluster)) })
	}
}

func testTimeSlicing(s *scenario) {
	s.machine("t4", sim.T4, sim.T4)
	s.policy("research", timeSlicing(4))

	written := s.settle()
	s.expectReady("research")
	s.Expect(s.allocatable("t4")).To(Equal(map[string]int64{"nvidia.com/gpu": 8}))
	s.Expect(without(without(written, "status"), "patch Pod")).To(Equal([]string{
		"apply ConfigMap gpu-sharing-device-plugin", "patch ClusterPolicy cluster-policy", "apply GPUNode t4", "patch Node t4",
	}), "what was reached is recorded in the status")
	s.Expect(s.gpuNode("t4").Generation).To(Equal(int64(2)), "which is no new desired state")
	s.Expect(s.gpuNode("t4").Status.Rollout.LastGood).NotTo(BeNil())
	s.Expect(s.clusterSpec()).To(MatchYAML(`
devicePlugin: {enabled: true, config: {name: gpu-sharing-device-plugin, default: ` + deviceplugin.Default("mixed").Key + `}}
mig: {}
`))
	s.Expect(s.announced()).To(ContainElements(
		"Normal ClusterPolicyConfigured spec.devicePlugin.config names ConfigMap gpu-operator/gpu-sharing-device-plugin and spec.mig.strategy is "+
			"empty, so that each node's key counts; what they were is recorded",
		"Normal DesiredStateChanged Set spec of GPUNode t4: applying policy research",
		"Normal Ready 1 node advertises what the policy asks for",
	))
}

func testEdit(s *scenario) {
	s.machine("a", sim.T4)
	s.machine("b", sim.T4)
	s.policy("research", timeSlicing(4))
	s.settle()
	s.policy("research", timeSlicing(6))

	written := s.settle()
	s.expectReady("research")
	s.Expect(s.allocatable("b")).To(Equal(map[string]int64{"nvidia.com/gpu": 6}))
	s.Expect(count(written, "apply ConfigMap")).To(Equal(1))
	s.Expect(count(written, "patch ClusterPolicy")).To(BeZero())
	s.Expect(count(written, "patch Node a")).To(Equal(1))
	s.Expect(count(written, "patch Node b")).To(Equal(1))
	s.Expect(count(written, "patch Pod")).To(Equal(4), "device plugin and GPU Feature Discovery on each node")
	s.Expect(slices.Index(written, "apply ConfigMap gpu-sharing-device-plugin")).
		To(BeNumerically("<", slices.Index(written, "patch Node a")))
	s.Expect(slices.IndexFunc(written, func(w string) bool { return strings.HasPrefix(w, "patch Pod") })).
		To(BeNumerically("<", slices.Index(written, "patch Node a")), "a key is visible before it is selected")

	s.policy("research", timeSlicing(5))
	s.settle()
	s.Expect(slices.Sorted(maps.Keys(s.configMap().Data))).To(HaveLen(2+2),
		"the two defaults, this one and the last: what nothing names goes")
}

func testConflict(s *scenario) {
	s.machine("t4", sim.T4)
	s.policy("first", timeSlicing(4))
	s.policy("second", "{priority: 1, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}}}")
	s.settle()
	s.expectReady("second")
	s.Expect(s.expectCondition("first", v1alpha1.ConditionAccepted, metav1.ConditionFalse, v1alpha1.ReasonConflicted)).
		To(Equal("Policy second governs t4; give this policy a higher priority, or select other nodes"))
	s.Expect(s.allocatable("t4")).To(HaveKeyWithValue("nvidia.com/gpu", int64(8)))
	s.Expect(s.announced()).To(ContainElement(HavePrefix("Warning Conflicted Policy second governs t4")))

	s.Expect(s.client.Delete(s.ctx(), s.getPolicy("second"))).To(Succeed())
	s.settle()
	s.expectReady("first")
	s.Expect(s.allocatable("t4")).To(HaveKeyWithValue("nvidia.com/gpu", int64(4)))
}

func testUndo(s *scenario) {
	s.machine("t4", sim.T4)
	s.machine("a100", sim.A100)
	s.settle()
	before := s.footprint()
	s.policy("t4s", `{gpuSelector: {products: ["Tesla-T4"]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}}`)
	s.policy("a100s", `{gpuSelector: {products: ["NVIDIA-A100-*"]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}}`)
	s.settle()
	s.expectReady("t4s")
	s.expectReady("a100s")
	s.Expect(s.allocatable("a100")).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7}))
	s.Expect(s.footprint()).NotTo(Equal(before))

	s.Expect(s.client.DeleteAllOf(s.ctx(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	s.settle()
	s.Expect(s.footprint()).To(Equal(before))
}

// footprint is all that the operator changes outside its own objects, and what of its own it leaves behind.
func (s *scenario) footprint() map[string]any {
	found := map[string]any{"ClusterPolicy": s.clusterSpec(), "ConfigMap": s.configMap()}
	for _, m := range s.nodes {
		node := s.node(m.name)
		found[m.name] = []any{node.Labels, node.Annotations, node.Spec.Taints, s.allocatable(m.name), s.gpuNode(m.name).Spec}
	}
	return found
}

func testOutdated(s *scenario) {
	s.machine("t4", sim.T4)
	s.policy("research", timeSlicing(4))
	_, err := s.reconcile()
	s.Expect(err).NotTo(HaveOccurred())
	s.others()
	// The policy changes after the reconcile has read it.
	s.uncached = interceptor.NewClient(s.client, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if list.GetObjectKind().GroupVersionKind().Kind == "GPUSharingPolicyList" {
				s.policy("research", timeSlicing(5))
			}
			return c.List(ctx, list, opts...)
		},
	})
	written, err := s.reconcile()
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(without(written, "status")).To(BeEmpty())
	s.uncached = s.client
	written, err = s.reconcile()
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(written).To(ContainElement("apply GPUNode t4"))
}

func testTaintsOfOthers(s *scenario) {
	s.machine("a100", sim.A100)
	s.policy("research", migPolicy("WaitForIdle"))
	theirs := `[{"key":"theirs","effect":"PreferNoSchedule"}]` // one that keeps none of NVIDIA's pods off
	s.fail = func(write string) error {                        // another controller is faster than the first write to the node
		if strings.HasPrefix(write, "patch Node") && s.node("a100").Spec.Taints == nil {
			s.merge(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a100"}}, `{"spec":{"taints":`+theirs+`}}`)
		}
		return nil
	}
	controller := s.controller()
	for s.node("a100").Spec.Taints == nil {
		result, err := controller.Reconcile(s.ctx(), reconciliation())
		s.Expect(err).NotTo(HaveOccurred(), "that is no failure")
		if s.node("a100").Spec.Taints != nil {
			s.Expect(result.RequeueAfter).To(BeNumerically("<=", time.Second), "and nothing to wait for")
		}
		s.others()
	}
	s.Expect(s.node("a100").Spec.Taints).To(ConsistOf(HaveField("Key", "theirs")))
	_, err := controller.Reconcile(s.ctx(), reconciliation())
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(s.node("a100").Spec.Taints).To(HaveLen(2), "the next reconcile decides anew")
	s.fail = nil
	s.settle()
	s.expectReady("research")
	s.Expect(s.node("a100").Spec.Taints).To(ConsistOf(HaveField("Key", "theirs")))
}

func (s *scenario) merge(o client.Object, patch string) {
	s.t.Helper()
	s.Expect(s.client.Patch(s.ctx(), o, client.RawPatch(types.MergePatchType, []byte(patch)))).To(Succeed())
}

func migPolicy(eviction string) string {
	return fmt.Sprintf("{rollout: {drain: {mode: %s}}, sharing: {strategy: MIG, mig: {layouts: [{fill: 3g.20gb}]}}}", eviction)
}

func testEviction(s *scenario) {
	m := s.machine("a100", sim.A100, sim.A100)
	holder := s.pod("default", "holder", "a100", func(p *corev1.Pod) { p.Labels = map[string]string{"app": "holder"} })
	bystander := s.pod("default", "bystander", "a100", nil)
	var uuid string
	m.hardware.Update(func(n *sim.Node) { uuid = n.GPUs[0].UUID })
	s.Expect(m.hardware.SetHolders(uuid, gpu.Holder{Namespace: "default", Pod: "holder", Container: "main", Instance: gpu.WholeGPU})).To(Succeed())
	s.others()
	budget := s.budget("holder")
	s.policy("research", migPolicy("Evict"))

	s.Eventually(s.evictions, "20s", "1ms").Should(ContainElement("eviction Pod holder"))
	s.Expect(s.announced()).To(ContainElement(HavePrefix("Warning EvictionBlocked Pod default/holder is not evicted: The disruption budget ")))
	result, err := s.controller().Reconcile(s.ctx(), reconciliation())
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(result.RequeueAfter).To(BeNumerically("~", 10e9, 1e9), "nothing tells when a budget allows it")
	s.Expect(s.node("a100").Spec.Taints).To(ConsistOf(HaveField("Key", v1alpha1.TaintChanging)))
	s.Expect(s.expectCondition("research", v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).
		To(ContainSubstring("pod default/holder"))

	s.Expect(s.client.Delete(s.ctx(), budget)).To(Succeed())
	s.evictions()
	s.Expect(s.client.Get(s.ctx(), client.ObjectKeyFromObject(holder), holder)).To(Satisfy(isGoing(holder)))
	s.Expect(client.IgnoreNotFound(s.client.Delete(s.ctx(), holder, client.GracePeriodSeconds(0)))).To(Succeed())
	s.Expect(m.hardware.SetHolders(uuid)).To(Succeed())
	s.settle()
	s.expectReady("research")
	s.Expect(s.allocatable("a100")).To(Equal(map[string]int64{"nvidia.com/mig-3g.20gb": 4}))
	s.Expect(s.node("a100").Spec.Taints).To(BeEmpty())
	s.Expect(s.client.Get(s.ctx(), client.ObjectKeyFromObject(bystander), bystander)).To(Succeed())
}

// testEmptied: a pod that holds no GPU is evicted, and its budget holds; those of DaemonSets and the operator's own
// stay.
func testEmptied(s *scenario) {
	rebooter := &hostfake.Rebooter{Boot: func() {}} // it is rebooted later
	s.boots = rebooter
	m := s.machine("a100", sim.A100)
	m.hardware.Update(func(n *sim.Node) { n.GPUs[0].NoReset = true })
	web := s.pod("default", "web", "a100", func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "web"}
		p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	})
	s.others()
	budget := s.budget("web")
	s.policy("research", "{rollout: {reboot: IfRequired, drain: {mode: Evict, beforeReboot: AllPods}}, "+
		"sharing: {strategy: MIG, mig: {layouts: [{fill: 3g.20gb}]}}}")
	var tried []string
	s.Eventually(func() []string {
		tried = append(tried, slices.DeleteFunc(s.evictions(), func(w string) bool { return !strings.HasPrefix(w, "eviction ") })...)
		return tried
	}, "20s", "1ms").ShouldNot(BeEmpty())
	for range 3 {
		s.evictions()
	}
	s.Expect(tried).To(ConsistOf("eviction Pod web"))
	s.Expect(s.gpuNode("a100").Status.Rollout.Blockers).To(ConsistOf(v1alpha1.BlockerStatus{
		Kind: v1alpha1.BlockerKindPod, Namespace: "default", Name: "web", Handling: "is evicted, as far as PodDisruptionBudgets allow",
	}))
	s.Expect(s.expectCondition("research", v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).
		To(ContainSubstring("pod default/web (the node, which must be rebooted)"))
	s.Expect(s.announced()).To(ContainElement(HavePrefix("Warning EvictionBlocked Pod default/web is not evicted: The disruption budget ")))
	s.Expect(s.gpuNode("a100").Spec.Reboot).To(BeNil())
	s.Expect(rebooter.Requested()).To(BeZero())

	s.Expect(s.client.Delete(s.ctx(), budget)).To(Succeed())
	s.evictions()
	s.Expect(s.client.Get(s.ctx(), client.ObjectKeyFromObject(web), web)).To(Satisfy(isGoing(web)))
	s.Expect(client.IgnoreNotFound(s.client.Delete(s.ctx(), web, client.GracePeriodSeconds(0)))).To(Succeed())
	s.Eventually(func() int { s.evictions(); return rebooter.Requested() }, "20s", "1ms").Should(Equal(1))
	agent := &corev1.Pod{}
	s.Expect(s.client.Get(s.ctx(), types.NamespacedName{Namespace: ownNamespace, Name: "a100-agent"}, agent)).To(Succeed())
	s.Expect(agent.DeletionTimestamp).To(BeNil())
}

func testRestoreInUse(s *scenario) {
	m := s.machine("a100", sim.A100)
	s.policy("research", migPolicy("WaitForIdle"))
	s.settle()
	s.expectReady("research")
	s.pod("default", "train", "a100", nil)
	var d sim.GPU
	m.hardware.Update(func(n *sim.Node) { d = n.GPUs[0] })
	holder := gpu.Holder{Namespace: "default", Pod: "train", Container: "main", Instance: d.Instances[0].ID}
	s.Expect(m.hardware.SetHolders(d.UUID, holder)).To(Succeed())
	s.others()
	s.announced()
	s.Expect(s.client.Delete(s.ctx(), s.getPolicy("research"))).To(Succeed())
	s.settle()
	const who = "pod default/train (GPU 0, instance 3g.20gb"
	ready, _ := condition.Find(s.gpuNode("a100").Status.Conditions, v1alpha1.ConditionReady)
	s.Expect(ready).To(And(HaveField("Reason", "GPUInUse"), HaveField("Message", And(MatchRegexp(`^Waiting until \d\d:\d\d:\d\d UTC for what must be freed: `), ContainSubstring(who)))))
	s.Expect(s.announced()).To(ContainElement(And(HavePrefix("Warning GPUInUse Node a100 is not in its baseline yet"), ContainSubstring(who))))
	s.Expect(m.hardware.SetHolders(d.UUID)).To(Succeed())
	s.settle()
	notes := s.gpuNode("a100").Annotations
	delete(notes, v1alpha1.AnnotationMachine) // which machine it is stays true
	s.Expect(notes).To(BeEmpty())
	s.Expect(s.gpuNode("a100").Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
}

func isGoing(pod *corev1.Pod) func(error) bool {
	return func(err error) bool { return err != nil || pod.DeletionTimestamp != nil }
}

// evictions is one reconcile, and what it wrote.
func (s *scenario) evictions() []string {
	written, err := s.reconcile()
	s.Expect(err).NotTo(HaveOccurred())
	s.others()
	return written
}

func (s *scenario) budget(app string) *policyv1.PodDisruptionBudget {
	s.t.Helper()
	all := intstr.FromString("100%")
	b := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: app},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
		},
	}
	s.Expect(s.client.Create(s.ctx(), b)).To(Succeed())
	b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, ExpectedPods: 1, DesiredHealthy: 1, CurrentHealthy: 1}
	s.Expect(s.client.Status().Update(s.ctx(), b)).To(Succeed())
	return b
}

func testUnsupported(s *scenario) {
	s.machine("t4", sim.T4)
	s.apply("{apiVersion: nvidia.com/v1alpha1, kind: GPUCluster, metadata: {name: dra}}")
	s.policy("research", timeSlicing(4))
	s.Expect(without(s.settle(), "status")).To(BeEmpty())
	s.expectCondition("research", v1alpha1.ConditionAccepted, metav1.ConditionFalse, v1alpha1.ReasonDRAStackActive)

	s.delete("{apiVersion: nvidia.com/v1alpha1, kind: GPUCluster, metadata: {name: dra}}")
	s.delete("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy}}")
	s.Expect(without(s.settle(), "status")).To(BeEmpty())
	s.expectCondition("research", v1alpha1.ConditionAccepted, metav1.ConditionFalse, v1alpha1.ReasonNoDevicePlugin)

	s.apply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: another}, spec: {devicePlugin: {enabled: true}}}")
	s.settle()
	s.expectReady("research")
}

func testGone(s *scenario) {
	s.machine("t4", sim.T4)
	s.policy("research", timeSlicing(4))
	_, err := s.reconcile()
	s.Expect(err).NotTo(HaveOccurred())
	s.others()
	s.fail = func(write string) error { // as the node's deletion would
		if write == "apply GPUNode t4" {
			s.Expect(s.client.Delete(s.ctx(), s.gpuNode("t4"))).To(Succeed())
		}
		return nil
	}
	written, err := s.reconcile()
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(written).To(ContainElement("apply GPUNode t4"))
	left := &v1alpha1.GPUNodeList{}
	s.Expect(s.client.List(s.ctx(), left)).To(Succeed())
	s.Expect(left.Items).To(BeEmpty())
}

func testPodTookPlace(s *scenario) {
	m := s.machine("a100", sim.A100)
	s.policy("research", timeSlicing(4))
	s.settle()
	s.policy("research", timeSlicing(6))
	synced := s.replaceBefore("patch Pod ")
	s.settle()
	s.expectReady("research")
	s.expectThere(synced)

	s.policy("research", `{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}}`)
	s.settle()
	inventory, err := m.hardware.Observe(s.ctx())
	s.Expect(err).NotTo(HaveOccurred())
	d := inventory.Devices[0]
	s.Expect(m.hardware.DestroyInstance(s.ctx(), d.UUID, d.State.Instances[0].ID)).To(Succeed())
	s.others() // the agent makes it again, and the device plugin has not seen it
	deleted := s.replaceBefore("delete Pod ")
	s.settle()
	s.expectReady("research")
	s.expectThere(deleted)
}

// replaceBefore lets another pod take the place of the one that is to be written to, once, right before the first such
// write. It returns that other pod, which is empty until then.
func (s *scenario) replaceBefore(write string) *corev1.Pod {
	s.t.Helper()
	pod := &corev1.Pod{}
	s.fail = func(what string) error {
		if name, is := strings.CutPrefix(what, write); is && pod.Name == "" {
			s.Expect(s.client.Get(s.ctx(), types.NamespacedName{Namespace: nvidiaSpace, Name: name}, pod)).To(Succeed())
			s.Expect(s.client.Delete(s.ctx(), pod, client.GracePeriodSeconds(0))).To(Succeed())
			pod.UID, pod.ResourceVersion = "", ""
			s.Expect(s.client.Create(s.ctx(), pod)).To(Succeed())
		}
		return nil
	}
	return pod
}

// expectThere expects that a pod is there and does not end.
func (s *scenario) expectThere(pod *corev1.Pod) {
	s.t.Helper()
	there := &corev1.Pod{}
	s.Expect(s.client.Get(s.ctx(), client.ObjectKeyFromObject(pod), there)).To(Succeed())
	s.Expect(there.UID).To(Equal(pod.UID))
	s.Expect(there.DeletionTimestamp).To(BeNil())
}

func testPaused(s *scenario) {
	s.machine("t4", sim.T4)
	s.policy("research", "{rollout: {paused: true}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}}")
	s.Expect(without(s.settle(), "status")).To(BeEmpty())
	s.expectCondition("research", v1alpha1.ConditionAccepted, metav1.ConditionTrue, v1alpha1.ReasonPaused)
	s.expectCondition("research", v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonPaused)
	s.policy("research", "{rollout: {paused: false}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}}")
	s.settle()
	s.expectReady("research")
}

func testOverridden(s *scenario) {
	s.machine("t4", sim.T4)
	s.policy("research", timeSlicing(4))
	s.settle()
	back := func() { // the second time is a fight
		s.apply(`{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy},
			spec: {devicePlugin: {enabled: true, config: {name: theirs, default: any}}, mig: {strategy: single}}}`)
	}
	back()
	s.Expect(s.settle()).To(ContainElement("patch ClusterPolicy cluster-policy"))
	s.expectReady("research")
	s.announced()
	s.clock.SetTime(time.Now()) // by which the API server says when a field was written
	back()
	s.policy("research", timeSlicing(6))
	result, err := s.controller().Reconcile(s.ctx(), reconciliation())
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(result.RequeueAfter).To(And(BeNumerically(">", 0), BeNumerically("<=", time.Hour)))
	s.Expect(without(s.writes, "status")).NotTo(ContainElement(HavePrefix("patch")))
	const who = `ClusterPolicy: field manager "kubectl" set devicePlugin.config.name "theirs", devicePlugin.config.default "any", mig.strategy "single" again; reverted at `
	s.Expect(s.expectCondition("research", v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonConfiguringDevicePlugin)).To(And(
		HavePrefix("0 of 1 node ready; node t4: "+who[:len(`ClusterPolicy: field manager "kubectl" set devicePlugin.config.name "theirs"`)]), HaveSuffix(" … Make it leave that alone")))
	s.Expect(s.getPolicy("research").Status.Pending).To(ConsistOf(HaveField("Message", And(HavePrefix(who), HaveSuffix(" UTC. Make it leave that alone")))))
	s.Expect(s.announced()).To(ContainElement(And(HavePrefix("Warning ClusterPolicyReverted"), ContainSubstring(who))))
}

func testPolicyTaints(s *scenario) {
	s.apply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy}, spec: {devicePlugin: {enabled: true}, " +
		"mig: {strategy: single}, daemonsets: {updateStrategy: RollingUpdate}, driver: {enabled: false}, toolkit: {enabled: false}}}")
	s.machine("t4", sim.T4)
	s.settle()
	before := s.footprint()
	shared := corev1.Taint{Key: "example.com/shared", Value: "yes", Effect: corev1.TaintEffectNoSchedule}
	s.policy("research", "{taints: [{key: example.com/shared, value: 'yes'}], sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}}")
	written := s.settle()
	s.expectReady("research")
	s.Expect(s.expectCondition("research", v1alpha1.ConditionTainted, metav1.ConditionTrue, v1alpha1.ReasonTaintsPresent)).
		To(Equal("The nodes of the policy have its taints: example.com/shared=yes:NoSchedule"))
	s.Expect(s.node("t4").Spec.Taints).To(ConsistOf(shared))
	s.Expect(count(written, "patch ClusterPolicy")).To(Equal(1), "configured and tolerated at once")
	s.Expect(s.announced()).To(ContainElement("Normal PolicyTaintsChanged Keep on node t4 the taints example.com/shared=yes:NoSchedule"))
	s.Expect(s.allocatable("t4")).To(HaveKeyWithValue("nvidia.com/gpu", int64(4)))

	node := s.node("t4")
	patch := client.MergeFrom(node.DeepCopy())
	node.Spec.Taints = []corev1.Taint{{Key: "others", Effect: corev1.TaintEffectNoSchedule}}
	s.Expect(s.client.Patch(s.ctx(), node, patch)).To(Succeed())
	s.settle()
	s.Expect(s.node("t4").Spec.Taints).To(ConsistOf(HaveField("Key", "others"), shared), "a user took it off by hand")
	node = s.node("t4")
	patch = client.MergeFrom(node.DeepCopy())
	node.Spec.Taints = node.Spec.Taints[1:]
	s.Expect(s.client.Patch(s.ctx(), node, patch)).To(Succeed())

	s.Expect(s.client.Delete(s.ctx(), s.getPolicy("research"))).To(Succeed())
	written = s.settle()
	s.Expect(s.node("t4").Spec.Taints).To(BeEmpty())
	s.Expect(slices.Index(written, "patch Node t4")).To(BeNumerically("<", slices.Index(written, "patch ClusterPolicy cluster-policy")))
	s.Expect(s.footprint()).To(Equal(before))
}
