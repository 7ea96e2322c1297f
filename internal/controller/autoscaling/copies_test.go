// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"maps"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

// TestAnnotationsThatClusterAPICopies: the MachineDeployment controller copies all annotations of a MachineDeployment
// to its MachineSets (kubernetes-sigs/cluster-api internal/controllers/machinedeployment/mdutil/util.go). The copies
// are not the operator's, and nothing waits for them to go.
func TestAnnotationsThatClusterAPICopies(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.Expect(s.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "capi"}})).To(Succeed())
	deployment := s.apply("{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment, metadata: {name: gpu, namespace: capi}, spec: {template: {metadata: {labels: {node-restriction.kubernetes.io/pool: gpu}}}}}")
	set := s.apply("{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineSet, metadata: {name: gpu-abc, namespace: capi, ownerReferences: " +
		"[{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment, name: gpu, controller: true, uid: " + string(deployment.GetUID()) + "}]}, spec: {}}")
	s.start()
	s.apply(`
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {matchLabels: {node-restriction.kubernetes.io/pool: gpu}}
  sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}
  autoscaling:
    mode: Manage
    nodeShapes: [{product: Tesla-T4, gpusPerNode: 1, nodeGroups: [{kind: MachineDeployment, namespace: capi, name: gpu}]}]
`)
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
		p := &v1alpha1.GPUSharingPolicy{}
		s.Expect(s.client.Get(t.Context(), client.ObjectKey{Name: "research"}, p)).To(Succeed())
		p.Spec.Sharing.TimeSlicing.Replicas = c.replicas
		s.Expect(s.client.Update(t.Context(), p)).To(Succeed())
		s.Eventually(counts(deployment), wait, poll).Should(HaveKeyWithValue(pure.AnnotationGPUCount, c.count))
		s.reports(v1alpha1.ReasonScaleDownCandidate)
	}
	s.Expect(counts(set)()).To(HaveKeyWithValue(pure.AnnotationGPUCount, "10"), "the copies are Cluster API's")
}
