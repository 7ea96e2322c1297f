// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"maps"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

const ofClusterAPI = `
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {matchLabels: {node-restriction.kubernetes.io/pool: gpu}}
  sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}
  autoscaling: {mode: Manage, nodeShapes: [{product: Tesla-T4, gpusPerNode: 1, nodeGroups: [{kind: MachineDeployment, namespace: capi, name: gpu}]}]}
`

// TestTheCapacityOfAnInfrastructureTemplate: what it says of whole GPUs, which no annotation hides, is reported before the first pod waits, with
// the rights that Manage needs. Without them the group says what to look at.
func TestTheCapacityOfAnInfrastructureTemplate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rights       []string
		reason, says string
	}{
		"with the rights":    {[]string{manage}, v1alpha1.ReasonMultipleResources, "status.capacity of AWSMachineTemplate capi/gpu-template says nvidia.com/gpu 1"},
		"without the rights": {nil, v1alpha1.ReasonNotPermitted, "If status.capacity of the infrastructure template"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, c.rights...)
			s.apply("{apiVersion: v1, kind: Namespace, metadata: {name: capi}}")
			template := s.apply("{apiVersion: infrastructure.cluster.x-k8s.io/v1beta2, kind: AWSMachineTemplate, metadata: {name: gpu-template, namespace: capi}, spec: {}}")
			template.Object["status"] = map[string]any{"capacity": map[string]any{"cpu": "96", "nvidia.com/gpu": "1"}}
			s.Expect(s.client.Status().Update(t.Context(), template)).To(Succeed())
			s.apply("{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment, metadata: {name: gpu, namespace: capi}, spec: {template: {metadata: {labels: " +
				"{node-restriction.kubernetes.io/pool: gpu}}, spec: {infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: AWSMachineTemplate, name: gpu-template}}}}}")
			s.start()
			s.apply(ofClusterAPI)
			s.Expect(s.reports(c.reason)).To(ContainSubstring(c.says))
		})
	}
}

// TestAnnotationsThatClusterAPICopies: the MachineDeployment controller copies all annotations of a MachineDeployment
// to its MachineSets (kubernetes-sigs/cluster-api internal/controllers/machinedeployment/mdutil/util.go). The copies
// are not the operator's, and nothing waits for them to go.
func TestAnnotationsThatClusterAPICopies(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.apply("{apiVersion: v1, kind: Namespace, metadata: {name: capi}}")
	deployment := s.apply("{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment, metadata: {name: gpu, namespace: capi}, spec: {template: {metadata: {labels: {node-restriction.kubernetes.io/pool: gpu}}}}}")
	set := s.apply("{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineSet, metadata: {name: gpu-abc, namespace: capi, ownerReferences: " +
		"[{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment, name: gpu, controller: true, uid: " + string(deployment.GetUID()) + "}]}, spec: {}}")
	s.start()
	s.apply(ofClusterAPI)
	counts := func(o *unstructured.Unstructured) func() map[string]string {
		return func() map[string]string {
			s.Expect(s.client.Get(t.Context(), client.ObjectKeyFromObject(o), o)).To(Succeed())
			return o.GetAnnotations()
		}
	}
	s.Eventually(counts(deployment), wait, poll).Should(HaveKeyWithValue(pure.AnnotationGPUCount, "10"))
	s.reports(v1alpha1.ReasonScaleDownCandidate)

	// Cluster API copies.
	annotations := maps.Clone(set.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	maps.Copy(annotations, deployment.GetAnnotations())
	set.SetAnnotations(annotations)
	s.Expect(s.client.Update(t.Context(), set, client.FieldOwner("manager"))).To(Succeed())

	// The operator still follows the policy, however often it changes.
	for _, c := range []struct {
		replicas int32
		count    string
	}{{4, "4"}, {5, "5"}, {6, "6"}} {
		p := s.policy()
		p.Spec.Sharing.TimeSlicing.Replicas = c.replicas
		s.Expect(s.client.Update(t.Context(), p)).To(Succeed())
		s.Eventually(counts(deployment), wait, poll).Should(HaveKeyWithValue(pure.AnnotationGPUCount, c.count))
		s.reports(v1alpha1.ReasonScaleDownCandidate)
	}
	s.Expect(counts(set)()).To(HaveKeyWithValue(pure.AnnotationGPUCount, "10"), "the copies are Cluster API's")
}

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
	p := s.policy()
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
