// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
)

// TestOurFieldsOfAConfigMapAreThoseThatClientGoExtracts, without the schema by which client-go does it.
func TestOurFieldsOfAConfigMapAreThoseThatClientGoExtracts(t *testing.T) {
	for name, fields := range map[string]string{
		"":            "", // nobody has applied anything
		"keys":        `{"f:data":{"f:a.b/c":{},"f:f:odd":{}}}`,
		"all of ours": `{"f:data":{"f:ours":{}},"f:metadata":{"f:labels":{"f:l":{}},"f:annotations":{"f:a/n":{}}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			configMap := &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "n", Name: "c", Labels: map[string]string{"l": "1", "theirs": "2"}, Annotations: map[string]string{"a/n": "3"},
					ManagedFields: []metav1.ManagedFieldsEntry{
						{Manager: "another", Operation: metav1.ManagedFieldsOperationApply, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:data":{"f:theirs":{}}}`)},
						{Manager: fieldManager, Operation: metav1.ManagedFieldsOperationUpdate, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:data":{"f:theirs":{}}}`)},
					},
				},
				Data: map[string]string{"ours": "x", "theirs": "y", "a.b/c": "z", "f:odd": ""},
			}
			if fields != "" {
				configMap.ManagedFields = append(configMap.ManagedFields, metav1.ManagedFieldsEntry{
					Manager: fieldManager, Operation: metav1.ManagedFieldsOperationApply, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fields),
				})
			}
			theirs, err := corev1ac.ExtractConfigMap(configMap, fieldManager)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(extract(configMap, fieldManager)).To(Equal(theirs))
		})
	}
}
