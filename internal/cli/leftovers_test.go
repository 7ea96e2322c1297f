// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

// restore waits for the startup taint of a node without a GPU label too: once the controller is gone, nobody takes it off. One that a user
// registers nodes with is the user's.
func TestTheStartupTaintOfANodeWithoutAGPULabelIsLeft(t *testing.T) {
	g := NewWithT(t)
	early := autoscaling.WithStartup(nil, true)
	theirs := []corev1.Taint{{Key: early[0].Key, Effect: corev1.TaintEffectNoSchedule}}
	c := fake.NewClientBuilder().WithObjects(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "new"}, Spec: corev1.NodeSpec{Taints: early}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "registered"}, Spec: corev1.NodeSpec{Taints: theirs}},
	).Build()
	left, err := leftNodes(t.Context(), c)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(left).To(Equal([]string{"node/new has the taint startup-taint.cluster-autoscaler.kubernetes.io/gpusharing"}))
}

// Once the agent is gone nobody removes the limits that it has set.
func TestMemoryLimitsThatTheAgentHasYetToRemoveAreLeft(t *testing.T) {
	g := NewWithT(t)
	scheme := runtime.NewScheme()
	g.Expect(v1alpha1.AddToScheme(scheme)).To(Succeed())
	n := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(n).Build()
	g.Expect(leftGPUNodes(t.Context(), c)).To(BeEmpty())
	n.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionMemoryLimited, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonLimitFailed, Message: "2 limits remain",
	}}
	g.Expect(c.Update(t.Context(), n)).To(Succeed())
	g.Expect(leftGPUNodes(t.Context(), c)).To(Equal([]string{"node/n1 may have the driver's memory limits yet: LimitFailed: 2 limits remain"}))
}
