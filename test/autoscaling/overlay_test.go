// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	s.advertise("nvidia.com/gpu.shared", 10)
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
	s.advertise("nvidia.com/mig-1g.5gb", 2)
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
func (s *site) autoscaling(reason string) string {
	s.t.Helper()
	return s.reported(v1alpha1.ConditionAutoscalingConfigured, reason)
}

// reported waits until a condition of the policy has a reason, and returns its message.
func (s *site) reported(kind, reason string) (message string) {
	s.t.Helper()
	s.Eventually(func() string {
		c, _ := condition.Find(s.policy().Status.Conditions, kind)
		message = c.Message
		return c.Reason
	}, wait, poll).Should(Equal(reason), func() string { return message })
	return message
}

// overlays are the NodeOverlays.
func (s *site) overlays() []string {
	s.t.Helper()
	return s.names("v1alpha1", "NodeOverlay")
}

// advertise waits until all Nodes advertise so much of a resource.
func (s *site) advertise(resource string, sum int) {
	s.t.Helper()
	s.Eventually(func() int64 { return s.advertised(resource) }, wait, poll).Should(BeEquivalentTo(sum))
}

// advertised is how much of a resource all Nodes advertise.
func (s *site) advertised(resource string) (sum int64) {
	s.t.Helper()
	for _, node := range s.nodes() {
		count := node.Status.Allocatable[corev1.ResourceName(resource)]
		sum += count.Value()
	}
	return sum
}

// pendingPods are pods that ask for one of a resource each, and stay pending.
func (s *site) pendingPods(n int, resource string) {
	s.t.Helper()
	for i := range n {
		s.unschedulable(s.pod(fmt.Sprintf("waiting-%s-%d", strings.ReplaceAll(resource, "/", "-"), i), resource, nil))
	}
	s.requested = time.Now()
}
