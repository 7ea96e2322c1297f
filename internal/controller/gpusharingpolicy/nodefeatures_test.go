// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestNodeFeatures is about the NodeFeature that keeps NVIDIA's MPS DaemonSet off a node.
func TestNodeFeatures(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	for name, test := range map[string]func(*scenario){
		"it comes before the agent is asked for MPS, and goes with the policy":                   testNodeFeature,
		"where Node Feature Discovery ignores it, the policy names it and the node is as before": testNodeFeatureIgnored,
		"it is written again where a user deletes it":                                            testNodeFeatureDeleted,
		"it loses the owner that an earlier version gave it":                                     testNodeFeatureOwned,
		"Node Feature Discovery has its time also if the clock of the controller is ahead":       testNodeFeatureAhead,
	} {
		t.Run(name, func(t *testing.T) {
			s := newScenario(t, cluster)
			s.noMPS = true
			test(s)
		})
	}
}

const byMPS = "{sharing: {strategy: MPS, mps: {replicas: 4}}, rollout: {drain: {mode: Evict}}}"

func testNodeFeature(s *scenario) {
	s.machine("t4", sim.T4)
	s.policy("research", byMPS)
	written := s.settle()
	asked, told := slices.Index(written, "apply NodeFeature zz-gpu-sharing-t4"), slices.Index(written, "apply GPUNode t4")
	s.Expect(asked).To(BeNumerically(">=", 0))
	s.Expect(told).To(BeNumerically(">", asked))
	s.Expect(s.gpuNode("t4").Spec.Devices[0].Sharing.MPS.Owner).To(Equal(v1alpha1.MPSDaemonOwnerGPUSharing))
	s.Expect(s.node("t4").Labels).To(And(HaveKeyWithValue(cluster.LabelMPSCapable, "false"), HaveKeyWithValue(v1alpha1.LabelOverridden, "true")))
	feature := s.nodeFeature("t4")
	s.Expect(feature.GetOwnerReferences()).To(BeEmpty(), "it outlives the GPUNode, which may go with its kind")
	s.Expect(cluster.RequestedMPSCapable(feature)).To(Equal("false"))

	s.Expect(s.client.Delete(s.ctx(), s.getPolicy("research"))).To(Succeed())
	s.settle()
	s.Expect(s.nodeFeature("t4")).To(BeNil())
	s.Expect(s.gpuNode("t4").Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
	s.expectNotOverridden("t4")
}

func testNodeFeatureOwned(s *scenario) {
	s.machine("t4", sim.T4)
	s.policy("research", byMPS)
	s.settle()
	was := s.nodeFeature("t4")
	owned := was.DeepCopy()
	owned.SetOwnerReferences([]metav1.OwnerReference{{
		APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "GPUNode", Name: "t4", UID: s.gpuNode("t4").UID,
	}})
	s.Expect(s.client.Update(s.ctx(), owned)).To(Succeed())
	s.settle()
	is := s.nodeFeature("t4")
	s.Expect(is.GetUID()).To(Equal(was.GetUID()))
	s.Expect(is.GetOwnerReferences()).To(BeEmpty())
	s.Expect(is.Object["spec"]).To(Equal(was.Object["spec"]))
}

func testNodeFeatureIgnored(s *scenario) {
	m := s.machine("t4", sim.T4)
	m.node.NFD.Ignores = []string{ownNamespace}
	s.policy("research", byMPS)
	made := s.clock.Now()
	for range 40 { // until the deadline
		_, err := s.reconcile()
		s.Expect(err).NotTo(HaveOccurred())
		s.others()
		if feature := s.nodeFeature("t4"); feature != nil {
			made = feature.GetCreationTimestamp().Time
		}
	}
	s.stepFrom(made, timing.NodeFeatureTimeout)
	s.settle()
	pending := s.getPolicy("research").Status.Pending
	s.Expect(pending).To(ConsistOf(HaveField("Reason", v1alpha1.ReasonNodeFeatureIgnored)))
	s.Expect(pending[0].Message).To(And(HavePrefix("NFD ignored NodeFeature zz-gpu-sharing-t4 for 30s, unlike "),
		HaveSuffix("; look at restrictions.denyNodeFeatureLabels, denyLabelNs and labelWhiteList of nfd-master")))
	s.Expect(s.nodeFeature("t4")).To(BeNil())
	s.expectNotOverridden("t4")
	s.Expect(s.node("t4").Spec.Taints).To(BeEmpty())
}

func testNodeFeatureAhead(s *scenario) {
	s.machine("t4", sim.T4)
	s.clock.Step(time.Hour) // the API server's clock is not
	s.policy("research", byMPS)
	for s.nodeFeature("t4") == nil {
		s.others()
		_, err := s.reconcile()
		s.Expect(err).NotTo(HaveOccurred())
	}
	for range 3 {
		_, err := s.reconcile()
		s.Expect(err).NotTo(HaveOccurred())
	}
	s.Expect(s.getPolicy("research").Status.Pending).To(ConsistOf(HaveField("Reason", v1alpha1.ReasonDisablingNVIDIAMPS)))
	s.settle()
	s.Expect(s.node("t4").Labels).To(HaveKeyWithValue(v1alpha1.LabelOverridden, "true"))
	s.Expect(s.getPolicy("research").Status.Pending).To(ConsistOf(HaveField("State", string(node.Applying))))
}

func testNodeFeatureDeleted(s *scenario) {
	s.machine("t4", sim.T4)
	s.policy("research", byMPS)
	s.settle()
	was := s.nodeFeature("t4")
	s.Expect(s.client.Delete(s.ctx(), was)).To(Succeed())
	s.settle()
	is := s.nodeFeature("t4")
	s.Expect(is).NotTo(BeNil())
	s.Expect(is.GetUID()).NotTo(Equal(was.GetUID()))
}

// expectNotOverridden checks that nothing of the operator's is left on a node.
func (s *scenario) expectNotOverridden(name string) {
	s.t.Helper()
	labels := s.node(name).Labels
	s.Expect(labels).NotTo(HaveKey(v1alpha1.LabelOverridden))
	s.Expect(labels).NotTo(HaveKey(v1alpha1.LabelConfig))
	s.Expect(labels).To(HaveKeyWithValue(cluster.LabelMPSCapable, "false"), "GPU Feature Discovery says so")
}

// nodeFeature is the operator's NodeFeature for a node; nil if there is none.
func (s *scenario) nodeFeature(node string) *unstructured.Unstructured {
	s.t.Helper()
	feature := newNodeFeature()
	err := s.client.Get(s.ctx(), client.ObjectKey{Namespace: ownNamespace, Name: action.OverrideName(node)}, feature)
	s.Expect(client.IgnoreNotFound(err)).To(Succeed())
	if err != nil {
		return nil
	}
	return feature
}

func newNodeFeature() *unstructured.Unstructured {
	return pluginconfig.NewNodeFeature(cluster.NodeFeatureKind())
}
