// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

// TestTheStartupTaintComesBeforeTheGPULabel: a node that joins a group of EKS gets the taint while it has no label of its GPUs, with the rights that
// the controller ships with and those of autoscalers not installed; and loses it with the policy.
func TestTheStartupTaintComesBeforeTheGPULabel(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.start()
	worker := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "nfd-worker", Labels: map[string]string{"app.kubernetes.io/name": "node-feature-discovery"}},
		Spec: corev1.PodSpec{
			NodeName: "another", Containers: []corev1.Container{{Name: "worker", Image: "example.invalid/nfd"}},
			Tolerations: []corev1.Toleration{{Key: v1alpha1.TaintStartupAutoscaler, Operator: corev1.TolerationOpExists}},
			Volumes:     []corev1.Volume{{Name: "sys", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/sys"}}}},
		},
	}
	s.Expect(s.client.Create(t.Context(), worker)).To(Succeed())
	s.apply(`
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {matchLabels: {eks.amazonaws.com/nodegroup: gpu}}
  sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}
  rollout: {startupTaint: UntilReady}
  autoscaling: {nodeShapes: [{product: Tesla-T4, gpusPerNode: 1, nodeGroups: [{kind: EKSNodeGroup, name: gpu}]}]}
`)
	s.Expect(s.reports(v1alpha1.ReasonAdviceOnly)).To(ContainSubstring("tells its group and has a label"))
	p := &v1alpha1.GPUSharingPolicy{}
	s.Expect(s.client.Get(t.Context(), client.ObjectKey{Name: "research"}, p)).To(Succeed())
	p.Status.Conditions = append(p.Status.Conditions, metav1.Condition{ // by the rollout, which does not run here
		Type: v1alpha1.ConditionTainted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonTaintsPresent, LastTransitionTime: metav1.Now(),
	})
	s.Expect(s.client.Status().Update(t.Context(), p)).To(Succeed())
	s.Eventually(func() bool { return time.Since(p.CreationTimestamp.Time) > time.Second }, wait, poll).Should(BeTrue(), "it is older than the node")
	join := func(name, group string) {
		s.Expect(s.client.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"eks.amazonaws.com/nodegroup": group}}})).To(Succeed())
	}
	ours := func(name string) func() []corev1.Taint {
		return func() (taints []corev1.Taint) {
			n := &corev1.Node{}
			s.Expect(s.client.Get(t.Context(), client.ObjectKey{Name: name}, n)).To(Succeed())
			for _, t := range n.Spec.Taints {
				if t.Key == v1alpha1.TaintStartupAutoscaler {
					taints = append(taints, t)
				}
			}
			return taints
		}
	}
	join("cpu", "cpu")
	join("new", "gpu")
	s.Eventually(ours("new"), wait, poll).Should(Equal([]corev1.Taint{{Key: v1alpha1.TaintStartupAutoscaler, Value: pure.Unlabelled, Effect: corev1.TaintEffectNoSchedule}}))
	s.Expect(ours("cpu")()).To(BeEmpty())
	s.Eventually(func() string { return s.groups()[0].Message }, wait, poll).ShouldNot(ContainSubstring("tells its group and has a label"))
	s.deletePolicy()
	s.Eventually(ours("new"), wait, poll).Should(BeEmpty())
}
