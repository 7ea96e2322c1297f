// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// shared is a policy of the nodes of NodePool gpu, with a shape for its instance type.
const shared = `
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {}
  sharing: %s
  rollout: {startupTaint: UntilReady}
  autoscaling:
    mode: Manage
    nodeShapes: [{product: NVIDIA-A100-SXM4-40GB, gpusPerNode: 1, instanceTypes: [gpu.one], nodeGroups: [{kind: NodePool, name: gpu}]}]
`

const (
	tenReplicas = "{strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}"
	twoProfiles = "{strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 2}, {profile: 3g.20gb, count: 1}]}]}}"
)

// manageNodes starts the operator with the right to write NodeOverlays.
func (s *site) manageNodes() {
	s.t.Helper()
	s.Expect(s.cluster.Apply(s.t.Context(), "config/autoscaling/rbac.yaml")).To(Succeed())
	s.startController("--karpenter-readiness-taint")
	s.playMachines()
	s.narrate()
	close(s.toolkit)
}

// TestAPodThatRequestsASharedGPU gets no node without the policy, and exactly one with it, which becomes what the pod
// asks for.
func TestAPodThatRequestsASharedGPU(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[]")
	s.manageNodes()
	close(s.driver)
	s.pendingPods(1, "nvidia.com/gpu.shared")
	s.noMore(0, "without the policy")

	s.apply(fmt.Sprintf(shared, tenReplicas))
	s.Eventually(s.nodeClaims, wait, poll).Should(HaveLen(1))
	s.Eventually(func() int64 { return s.advertised("nvidia.com/gpu.shared") }, wait, poll).Should(BeEquivalentTo(10))
	s.Eventually(func() string { return s.initialized(s.nodeClaims()[0]) }, wait, poll).Should(Equal("Initialized"))
	s.Eventually(s.taints, wait, poll).Should(BeEmpty())
	s.noMore(1, "once the node is ready")
	s.known()

	s.Expect(s.client.Delete(t.Context(), s.policy())).To(Succeed())
	s.Eventually(s.overlays, wait, poll).Should(BeEmpty())
}

// TestPodsThatRequestTwoProfiles get one node, whose GPU the agent partitions.
func TestPodsThatRequestTwoProfiles(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[]")
	s.manageNodes()
	close(s.driver)
	close(s.changing)
	s.pendingPods(1, "nvidia.com/mig-1g.5gb")
	s.pendingPods(1, "nvidia.com/mig-3g.20gb")
	s.noMore(0, "without the policy")

	s.apply(fmt.Sprintf(shared, twoProfiles))
	s.Eventually(s.nodeClaims, wait, poll).Should(HaveLen(1))
	s.Eventually(func() int64 { return s.advertised("nvidia.com/mig-1g.5gb") }, wait, poll).Should(BeEquivalentTo(2))
	s.Expect(s.advertised("nvidia.com/mig-3g.20gb")).To(BeEquivalentTo(1))
	s.Eventually(func() string { return s.initialized(s.nodeClaims()[0]) }, wait, poll).Should(Equal("Initialized"))
	s.noMore(1, "once the node is ready")
}

// TestTwelvePodsOnTenReplicas get two nodes.
func TestTwelvePodsOnTenReplicas(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[]")
	s.manageNodes()
	s.apply(fmt.Sprintf(shared, tenReplicas))
	s.known()
	s.pendingPods(12, "nvidia.com/gpu.shared")
	s.Eventually(s.nodeClaims, wait, poll).Should(HaveLen(2))
	s.noMore(2, "for twelve pods")
}

// TestWithoutTheFeatureGate: Karpenter leaves the NodeOverlay without a status, and the policy reports that.
func TestWithoutTheFeatureGate(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[]", "--feature-gates=NodeOverlay=false")
	s.manageNodes()
	s.pendingPods(1, "nvidia.com/gpu.shared")
	s.apply(fmt.Sprintf(shared, tenReplicas))
	s.Eventually(s.overlays, wait, poll).Should(HaveLen(1))
	s.Expect(s.autoscaling(v1alpha1.ReasonFeatureGateOff)).To(ContainSubstring("--feature-gates=NodeOverlay=true"))
	s.Expect(s.nodeClaims()).To(BeEmpty())
}

// known waits until Karpenter knows what new nodes advertise. The NodePool has a limit for nvidia.com/gpu, which does
// not hold then.
func (s *site) known() {
	s.t.Helper()
	s.Expect(s.autoscaling(v1alpha1.ReasonLimitsNotCounted)).To(ContainSubstring("Set a limit for nvidia.com/gpu.shared"))
	c, _ := condition.Find(s.policy().Status.Conditions, v1alpha1.ConditionAutoscalingConfigured)
	s.Expect(c.Status).To(Equal(metav1.ConditionTrue), c.Message)
}

// autoscaling waits until the condition AutoscalingConfigured has a reason, and returns its message.
func (s *site) autoscaling(reason string) (message string) {
	s.t.Helper()
	s.Eventually(func() string {
		c, _ := condition.Find(s.policy().Status.Conditions, v1alpha1.ConditionAutoscalingConfigured)
		message = c.Message
		return c.Reason
	}, wait, poll).Should(Equal(reason), func() string { return message })
	return message
}

// overlays are the NodeOverlays.
func (s *site) overlays() []string {
	s.t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: "karpenter.sh", Version: "v1alpha1", Kind: "NodeOverlayList"})
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].GetName())
	}
	return names
}

// advertised is how much of a resource all Nodes advertise.
func (s *site) advertised(resource string) (sum int64) {
	s.t.Helper()
	nodes := s.nodes()
	for i := range nodes {
		for name, quantity := range nodes[i].Status.Allocatable {
			if string(name) == resource {
				sum += quantity.Value()
			}
		}
	}
	return sum
}

// pendingPods are pods that ask for one of a resource each.
func (s *site) pendingPods(n int, resource string) {
	s.t.Helper()
	for i := range n {
		s.pending(fmt.Sprintf("waiting-%s-%d", strings.ReplaceAll(resource, "/", "-"), i), resource)
	}
	s.requested = time.Now()
}
