// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
)

// TestAGPUNodeIsAppliedUnlessItIsSoByUs: also where another one has written the very spec, which the operator could not
// remove otherwise.
func TestAGPUNodeIsAppliedUnlessItIsSoByUs(t *testing.T) {
	g := NewWithT(t)
	applies, statuses := 0, 0
	c := interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			applies++
			return nil
		},
		SubResourceApply: func(context.Context, client.Client, string, runtime.ApplyConfiguration, ...client.SubResourceApplyOption) error {
			statuses++
			return nil
		},
	})
	spec := v1alpha1.GPUNodeSpec{PolicyName: "p", ConfigName: "c"}
	entry := func(manager, subresource, fields string) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{
			Manager: manager, Operation: metav1.ManagedFieldsOperationApply, Subresource: subresource, FieldsV1: metav1.NewFieldsV1(fields),
		}
	}
	for _, tc := range []struct {
		have   v1alpha1.GPUNodeSpec
		fields metav1.ManagedFieldsEntry
		want   v1alpha1.GPUNodeSpec
		writes int
	}{
		{have: spec, fields: entry(fieldManager, "", `{"f:spec":{}}`), want: spec},
		{have: spec, fields: entry(fieldManager, "", `{"f:spec":{}}`), want: v1alpha1.GPUNodeSpec{PolicyName: "q"}, writes: 1},
		{have: spec, fields: entry("kubectl", "", `{"f:spec":{}}`), want: spec, writes: 1},
		{have: spec, fields: entry(fieldManager, "", `{"f:metadata":{}}`), want: spec, writes: 1},
		{have: spec, fields: entry(fieldManager, "status", `{"f:spec":{}}`), want: spec, writes: 1},
		{fields: entry("kubectl", "", `{}`)},
	} {
		applies = 0
		node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n", ManagedFields: []metav1.ManagedFieldsEntry{tc.fields}}, Spec: tc.have}
		node.Status.Rollout.State, node.Status.BootID = "UpToDate", "the agent's"
		w := &writer{Controller: New(c, Options{}), seen: &seen{gpuNodes: map[string]*v1alpha1.GPUNode{"n": node}}}
		wrote, err := w.setSpec(t.Context(), action.SetSpec{Node: "n", Spec: tc.want})
		g.Expect(wrote, err).To(Equal(tc.writes == 1))
		g.Expect(applies).To(Equal(tc.writes))

		status := v1alpha1.GPUNodeStatus{Rollout: node.Status.Rollout}
		g.Expect(w.reportNode(t.Context(), action.Report{Node: "n", Status: status})).To(BeFalse())
		status.ObservedGeneration = 1
		g.Expect(w.reportNode(t.Context(), action.Report{Node: "n", Status: status})).To(BeTrue())
	}
	g.Expect(statuses).To(Equal(6))
}
