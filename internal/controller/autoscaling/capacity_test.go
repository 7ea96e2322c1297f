// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

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
			s.Expect(s.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "capi"}})).To(Succeed())
			template := s.apply("{apiVersion: infrastructure.cluster.x-k8s.io/v1beta2, kind: AWSMachineTemplate, metadata: {name: gpu-template, namespace: capi}, spec: {}}")
			template.Object["status"] = map[string]any{"capacity": map[string]any{"cpu": "96", "nvidia.com/gpu": "1"}}
			s.Expect(s.client.Status().Update(t.Context(), template)).To(Succeed())
			s.apply("{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment, metadata: {name: gpu, namespace: capi}, spec: {template: {metadata: {labels: " +
				"{node-restriction.kubernetes.io/pool: gpu}}, spec: {infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: AWSMachineTemplate, name: gpu-template}}}}}")
			s.start()
			s.apply(`
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {matchLabels: {node-restriction.kubernetes.io/pool: gpu}}
  sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}
  autoscaling: {mode: Manage, nodeShapes: [{product: Tesla-T4, gpusPerNode: 1, nodeGroups: [{kind: MachineDeployment, namespace: capi, name: gpu}]}]}
`)
			s.Expect(s.reports(c.reason)).To(ContainSubstring(c.says))
		})
	}
}
