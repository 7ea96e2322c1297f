// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestPlanPrintsWhatAutoscalersMustKnow: YAML that the API server takes as it is printed, and a command, and it writes
// nothing itself.
func TestPlanPrintsWhatAutoscalersMustKnow(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t, env.WithNVIDIA(), env.WithAutoscalers())
	apply := func(object string) *unstructured.Unstructured {
		o := &unstructured.Unstructured{}
		g.Expect(yaml.Unmarshal([]byte(object), &o.Object)).To(Succeed())
		g.Expect(cluster.ApplyObject(t.Context(), o)).To(Succeed())
		return o
	}
	g.Expect(cluster.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "capi"}})).To(Succeed())
	apply("{apiVersion: karpenter.sh/v1, kind: NodePool, metadata: {name: gpu}, spec: {template: {metadata: {labels: {team: a}}}}}")
	apply("{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment, metadata: {name: workers, namespace: capi, annotations: {" +
		"capacity.cluster-autoscaler.kubernetes.io/labels: team=a}}, spec: {}}")
	kubeconfig := env.KubeconfigFile(t, cluster.Config)
	var out strings.Builder
	p := &Program{In: strings.NewReader(`
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {matchLabels: {team: a}}
  sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}
  autoscaling:
    nodeShapes:
    - {product: Tesla-T4, gpusPerNode: 2, instanceTypes: [gpu.two], nodeGroups: [{kind: NodePool, name: gpu}, {kind: MachineDeployment, namespace: capi, name: workers}]}
`), Out: &out, Clock: clocktesting.NewFakeClock(now), Width: 100}
	g.Expect(failure(p.Run(t.Context(), []string{"plan", "-f", "-", "--kubeconfig", kubeconfig}))).To(Succeed())
	g.Expect(out.String()).To(And(
		ContainSubstring("\nNODE GROUP NodePool gpu of policy research: 0 nodes, scaled by Karpenter\n"),
		ContainSubstring("  advertises   nvidia.com/gpu.shared: 20\n"),
		ContainSubstring("\nNODE GROUP MachineDeployment capi/workers of policy research: 0 nodes, scaled by ClusterAutoscaler\n"),
		ContainSubstring("\nkubectl annotate --overwrite -n capi machinedeployment.cluster.x-k8s.io workers "),
	))
	_, pasted, found := strings.Cut(out.String(), "\napiVersion: karpenter.sh")
	g.Expect(found).To(BeTrue(), out.String())
	overlays := &unstructured.UnstructuredList{}
	overlays.SetAPIVersion("karpenter.sh/v1alpha1")
	overlays.SetKind("NodeOverlayList")
	g.Expect(cluster.Client.List(t.Context(), overlays)).To(Succeed())
	g.Expect(overlays.Items).To(BeEmpty())
	o := apply("apiVersion: karpenter.sh" + pasted)
	capacity, _, _ := unstructured.NestedStringMap(o.Object, "spec", "capacity")
	g.Expect(capacity).To(Equal(map[string]string{"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "20"}))
}
