// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

func TestTheCacheKeepsWhatANodeFeatureSaysOfMPS(t *testing.T) {
	const namespace = "gpu-sharing-operator"
	created := time.Unix(1_800_000_000, 0)
	for name, annotations := range map[string]map[string]string{
		action.OverrideName("a"):    {v1alpha1.AnnotationMPSCapable: timing.Stamp("false", created.Add(time.Hour))},
		"nvidia-features-for-a":     nil,
		"of-another-in-a-namespace": {"other": "x"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			feature := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
				"labels":   map[string]any{cluster.LabelMPSCapable: "true", "other": "x"},
				"features": map[string]any{"flags": map[string]any{}},
			}}}
			feature.SetGroupVersionKind(cluster.NodeFeatureKind())
			feature.SetNamespace(namespace)
			feature.SetName(name)
			feature.SetCreationTimestamp(metav1.NewTime(created))
			feature.SetLabels(map[string]string{cluster.LabelNodeName: "a", "other": "x"})
			feature.SetAnnotations(annotations)
			kept, err := pluginconfig.SlimNodeFeature(feature)
			g.Expect(err).NotTo(HaveOccurred())
			slim := kept.(*unstructured.Unstructured)
			g.Expect(slim.Object["spec"]).NotTo(HaveKey("features"))
			g.Expect(cluster.NodeFeatures{}.With(slim, namespace)).To(Equal(cluster.NodeFeatures{}.With(feature, namespace)))
		})
	}
}
