// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

const renamedReplicas = `
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {}
  sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}
  autoscaling:
    mode: Manage
    nodeShapes: [{product: Tesla-T4, gpusPerNode: 1, instanceTypes: [gpu.one], nodeGroups: [{kind: NodePool, name: gpu}]}]
`

const nodePool = "{apiVersion: karpenter.sh/v1, kind: NodePool, metadata: {name: gpu}, spec: {template: {spec: {requirements: []}}}}"

func TestANodeOverlayComesAndGoesWithThePolicy(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.apply(nodePool)
	s.start()
	s.apply(renamedReplicas)
	s.reports(v1alpha1.ReasonConfiguring)
	s.Eventually(s.overlays, wait, poll).Should(HaveLen(1))
	o := s.overlays()[0]
	capacity, _, _ := unstructured.NestedStringMap(o.Object, "spec", "capacity")
	s.Expect(capacity).To(Equal(map[string]string{"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "10"}))
	s.Expect(o.GetOwnerReferences()).To(HaveLen(1))

	// Karpenter applies it.
	o.Object["status"] = map[string]any{"conditions": []any{map[string]any{"type": "Ready", "status": "True", "reason": "Ready", "message": ""}}}
	s.Expect(s.client.Status().Update(t.Context(), &o)).To(Succeed())
	s.reports(v1alpha1.ReasonConfigured)

	// A user changes it, so that the operator's next value has two owners.
	s.Expect(s.client.Patch(t.Context(), &o, client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"weight": 9}}`)), client.FieldOwner("kubectl-edit"))).To(Succeed())
	s.Expect(s.reports(v1alpha1.ReasonOwnedByOther)).To(ContainSubstring("kubectl-edit"))
	s.deletePolicy()
	s.Eventually(s.overlays, wait, poll).Should(BeEmpty())
}

// TestANodeOverlayStaysWhenThePoliciesGoWithTheirKind: nobody has released anything. (Garbage collection, which this
// cluster has not, deletes it with its owner.)
func TestANodeOverlayStaysWhenThePoliciesGoWithTheirKind(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.apply(nodePool)
	s.start()
	s.apply(renamedReplicas)
	s.Eventually(s.overlays, wait, poll).Should(HaveLen(1))
	was := s.overlays()[0].GetUID()
	s.Expect(s.cluster.DeleteKind(t.Context(), pluginconfig.PolicyDefinition)).To(Succeed())
	s.Eventually(func() bool {
		return apierrors.IsNotFound(s.client.Get(t.Context(), client.ObjectKey{Name: pluginconfig.PolicyDefinition}, pluginconfig.Definitions()))
	}, wait, poll).Should(BeTrue())
	s.Consistently(s.overlays, 3*time.Second, poll).Should(ConsistOf(HaveField("GetUID()", was)))
	s.Expect(s.cluster.Apply(t.Context(), "config/crd/gpusharing.io_gpusharingpolicies.yaml")).To(Succeed())
	s.Eventually(s.overlays, time.Minute, poll).Should(BeEmpty(), "the kind is back, and no policy asks for it")
}

// TestKindsOfKarpenterThatComeLater: nothing is watched before, and everything is written in the version that is served. Without node groups
// nobody reads what agents report, and a policy that names none reports nothing.
func TestKindsOfKarpenterThatComeLater(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.Expect(s.cluster.Serve(t.Context(), "nodeoverlays.karpenter.sh")).To(Succeed())
	s.node("worker-1", "Tesla-T4", 1, map[string]string{"a": "b"}, nil)
	s.start()
	other := s.apply("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: other}, spec: " +
		"{nodeSelector: {matchLabels: {a: b}}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}}}}")
	s.apply(renamedReplicas)
	s.reports(v1alpha1.ReasonNodeGroupNotFound)
	s.Expect(s.reads.Load()).To(BeZero())
	s.apply(nodePool)
	s.reports(v1alpha1.ReasonOverlayNotServed)
	s.Expect(s.reads.Load()).NotTo(BeZero())
	was := other.GetResourceVersion()
	s.Expect(s.client.Get(t.Context(), client.ObjectKeyFromObject(other), other)).To(Succeed())
	s.Expect(other.GetResourceVersion()).To(Equal(was))
	s.Expect(s.cluster.Serve(t.Context(), "nodeoverlays.karpenter.sh", "v1beta1")).To(Succeed())
	s.reports(v1alpha1.ReasonConfiguring)
	o := &unstructured.UnstructuredList{}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: pure.GroupKarpenter, Version: "v1beta1", Kind: "NodeOverlayList"})
	s.Eventually(func() ([]unstructured.Unstructured, error) {
		err := s.client.List(t.Context(), o)
		return o.Items, err
	}, wait, poll).Should(HaveLen(1))
}

// TestAdviseIsTheDefault: nothing is written, not even with the rights.
func TestAdviseIsTheDefault(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.apply(nodePool)
	s.node("worker-1", "Tesla-T4", 1, map[string]string{"karpenter.sh/nodepool": "gpu", "node.kubernetes.io/instance-type": "gpu.one"}, nil)
	s.start()
	s.apply("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: research}, spec: " +
		"{nodeSelector: {}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}, advertise: {renameByDefault: true}}}}")
	s.reports(v1alpha1.ReasonAdviceOnly)
	s.Consistently(s.overlays, 2*time.Second, poll).Should(BeEmpty())
}
