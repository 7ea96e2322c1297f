// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"errors"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpusharingpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// twoReady is a cluster in which a policy shares the GPUs of nodes a and b, one after the other.
func twoReady(t *testing.T) *scenario {
	t.Helper()
	s := newScenario(t, env.Start(t, env.WithNVIDIA()))
	s.machine("a", sim.T4)
	s.machine("b", sim.T4)
	s.policy("research", timeSlicing(4))
	s.settle()
	s.expectReady("research")
	return s
}

// reconciled lets one controller reconcile.
func (s *scenario) reconciled(c *gpusharingpolicy.Controller) error {
	s.t.Helper()
	_, err := c.Reconcile(log.IntoContext(s.ctx(), logr.Discard()), reconciliation())
	return err
}

func (s *scenario) pending(policy, node string) v1alpha1.PendingNode {
	s.t.Helper()
	for _, n := range s.getPolicy(policy).Status.Pending {
		if n.NodeName == node {
			return n
		}
	}
	return v1alpha1.PendingNode{}
}

// TestAGPUNodeThatCannotBeMadeAgainCostsItsNodeOnly: the API server refuses to make the GPUNode of a node that the operator has changed.
// All other nodes go on, the node stays as it is, and its policy names it.
func TestAGPUNodeThatCannotBeMadeAgainCostsItsNodeOnly(t *testing.T) {
	t.Parallel()
	s := twoReady(t)
	label := s.node("a").Labels[v1alpha1.LabelConfig]
	s.Expect(s.client.Delete(s.ctx(), s.gpuNode("a"))).To(Succeed())
	nodes := s.nodes
	s.nodes = nodes[1:] // nobody makes the GPUNode of a again
	s.policy("research", timeSlicing(2))
	c := s.controller()
	for range 40 {
		_ = s.reconciled(c)
		s.others()
	}
	s.Expect(s.allocatable("b")).To(HaveKeyWithValue("nvidia.com/gpu", int64(2)), "the other node")
	s.Expect(s.pending("research", "a").Reason).To(Equal(v1alpha1.ReasonGPUNodeMissing))
	s.Expect(s.node("a").Labels).To(HaveKeyWithValue(v1alpha1.LabelConfig, label), "the node stays as it is")
	s.Expect(s.configMap().Data).To(HaveKey(label), "and so does what it selects")

	s.Expect(s.client.DeleteAllOf(s.ctx(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	for range 40 {
		_ = s.reconciled(c)
		s.others()
	}
	s.Expect(s.node("b").Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
	s.Expect(s.configMap().Data).To(HaveKey(label), "the ClusterPolicy is not restored as long as node a is not")
	s.nodes = nodes
	s.others()
	s.clock.Step(15 * time.Minute) // a GPUNode that was made anew waits for its policy
	for range 40 {
		s.Expect(s.reconciled(c)).To(Succeed())
		s.others()
	}
	s.Expect(s.node("a").Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
	s.Expect(s.configMap()).To(BeNil())
}

// TestARefusedConfigMapIsReported: nothing makes NVIDIA's programs read what is not there, no node begins, and the policy says why.
func TestARefusedConfigMapIsReported(t *testing.T) {
	for says, refuse := range map[string]error{
		"not today":                           apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, pluginconfig.ConfigMapName, errors.New("not today")),
		`namespaces "gpu-operator" not found`: apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "gpu-operator"), // and the ClusterPolicy names it still
	} {
		t.Run(says, func(t *testing.T) {
			t.Parallel()
			s := newScenario(t, env.Start(t, env.WithNVIDIA()))
			s.machine("a", sim.A100)
			was := s.clusterSpec()
			s.fail = func(write string) error {
				if write == "apply ConfigMap "+pluginconfig.ConfigMapName {
					return refuse
				}
				return nil
			}
			s.policy("research", "{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}}}")
			c := s.controller()
			for range 20 {
				_ = s.reconciled(c)
				s.others()
			}
			is := s.pending("research", "a")
			s.Expect(is.Reason).To(Equal(v1alpha1.ReasonWriteFailed))
			s.Expect(is.Message).To(ContainSubstring(says))
			s.Expect(s.clusterSpec()).To(Equal(was))
			s.Expect(s.node("a").Spec.Taints).To(BeEmpty())
			s.fail = nil
			for range 60 {
				_ = s.reconciled(c)
				s.others()
			}
			s.expectReady("research")
		})
	}
}

// TestARefusedWriteCostsItsNodeOnly: an admission webhook refuses what the operator writes about one node, which would be the first to change.
func TestARefusedWriteCostsItsNodeOnly(t *testing.T) {
	for name, refuse := range map[string]error{
		"by a policy":  apierrors.NewForbidden(schema.GroupResource{Resource: "gpunodes"}, "a", errors.New("not today")),
		"for its size": apierrors.NewInvalid(schema.GroupKind{Kind: "GPUNode"}, "a", nil),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := twoReady(t)
			s.fail = func(write string) error {
				if write == "apply GPUNode a" {
					return refuse
				}
				return nil
			}
			s.policy("research", timeSlicing(2))
			c := s.controller()
			for range 40 {
				_ = s.reconciled(c)
				s.others()
			}
			s.Expect(s.allocatable("b")).To(HaveKeyWithValue("nvidia.com/gpu", int64(2)), "the other node")
			is := s.pending("research", "a")
			s.Expect(is.Reason).To(Equal(v1alpha1.ReasonWriteFailed))
			s.Expect(is.Message).To(ContainSubstring("GPUNode a"))
			s.fail = nil
			s.clock.Step(time.Minute)
			for range 40 {
				_ = s.reconciled(c)
				s.others()
			}
			s.expectReady("research")
		})
	}
}
