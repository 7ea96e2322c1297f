// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

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
