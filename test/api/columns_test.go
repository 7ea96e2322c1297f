// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestColumnsShowAGenerationThatNoControllerHasObserved: Ready alone would be read as the answer to the last edit.
func TestColumnsShowAGenerationThatNoControllerHasObserved(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	o := policy(t, "edited", `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
	g.Expect(cluster.Client.Create(t.Context(), o)).To(Succeed())
	p := &v1alpha1.GPUSharingPolicy{}
	g.Expect(cluster.Client.Get(t.Context(), client.ObjectKeyFromObject(o), p)).To(Succeed())
	p.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady, ObservedGeneration: p.Generation,
		LastTransitionTime: metav1.Now(),
	}}
	g.Expect(cluster.Client.Status().Update(t.Context(), p)).To(Succeed())
	p.Spec.Sharing.TimeSlicing.Replicas = 8
	g.Expect(cluster.Client.Update(t.Context(), p)).To(Succeed())

	config := rest.CopyConfig(cluster.Config)
	config.GroupVersion, config.APIPath = &v1alpha1.SchemeGroupVersion, "/apis"
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	c, err := rest.RESTClientFor(config)
	g.Expect(err).NotTo(HaveOccurred())
	table := &metav1.Table{}
	g.Expect(c.Get().Resource("gpusharingpolicies").SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").
		Do(t.Context()).Into(table)).To(Succeed())
	shown := map[string]any{}
	for i, column := range table.ColumnDefinitions {
		if column.Priority == 0 {
			shown[column.Name] = table.Rows[0].Cells[i]
		}
	}
	g.Expect(shown).To(And(HaveKeyWithValue("Ready", "True"), HaveKeyWithValue("Generation", BeNumerically("==", 2)),
		HaveKeyWithValue("Observed", BeNumerically("==", 1))))
}
