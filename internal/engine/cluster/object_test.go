// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// Labels of sharing by which a pod selects its node are told, wherever it does, and no others.
func TestLabelsOfSharingByWhichAPodSelectsItsNode(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{
		NodeSelector: map[string]string{"nvidia.com/gpu.product": "Tesla-T4", "pool": "a", "nvidia.com/gpu.present": "true"},
		Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: "nvidia.com/mig-1g.5gb.count", Operator: corev1.NodeSelectorOpExists}, {Key: "nvidia.com/gpu.product", Operator: corev1.NodeSelectorOpExists},
			}}},
		}}},
		Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}}}},
	}}
	NewWithT(t).Expect(cluster.PodOf(pod, &cluster.Programs{}).SharingLabels).To(Equal([]string{"nvidia.com/gpu.product", "nvidia.com/mig-1g.5gb.count"}))
	pod.Spec.Containers = nil
	NewWithT(t).Expect(cluster.PodOf(pod, &cluster.Programs{}).SharingLabels).To(BeEmpty())
}

// TestAWorkloadIsNamedByNamesAlone: the API server takes any text as the kind and the name of a pod's owner, and the name of a workload stands in
// conditions of policies and in Events.
func TestAWorkloadIsNamedByNamesAlone(t *testing.T) {
	for name, want := range map[string]string{
		"web": "StatefulSet team/web",
		"x asks for nothing; run kubectl delete gpusharingpolicies --all": "pod team/web-0",
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: "web-0", OwnerReferences: []metav1.OwnerReference{{Kind: "StatefulSet", Name: name, Controller: new(true)}},
		}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")},
		}}}}}
		NewWithT(t).Expect(cluster.PodOf(pod, &cluster.Programs{}).Workload).To(Equal(want))
	}
}
