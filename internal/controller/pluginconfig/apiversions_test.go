// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestServedVersions: a later GPU Operator serves its kinds in other versions than those that we know.
func TestServedVersions(t *testing.T) {
	cluster := env.Start(t, env.WithNVIDIA())
	f := &fixture{WithT: NewWithT(t), t: t, client: cluster.Client, clock: clocktesting.NewFakePassiveClock(time.Now())}
	f.Expect(f.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	const clusters, policies, features = "gpuclusters.nvidia.com", "clusterpolicies.nvidia.com", "nodefeatures.nfd.k8s-sigs.io"

	policy := f.policy("cluster-policy", installed)
	f.Expect(cluster.Serve(t.Context(), policies, "v2")).To(Succeed())
	f.Expect(cluster.Serve(t.Context(), clusters, "v1beta1", "v1beta2")).To(Succeed())
	f.Eventually(func() error { return f.tryConfigure(research) }, "20s", "100ms").Should(Succeed())
	now := f.inVersion("v2", policy)
	f.Expect(now.Object).To(HaveKeyWithValue("spec", HaveKeyWithValue("devicePlugin", HaveKeyWithValue("config",
		HaveKeyWithValue("name", pluginconfig.ConfigMapName)))), "read and written in the version that is served")

	dra := nvidia("GPUCluster", "dra")
	dra.SetAPIVersion("nvidia.com/v1beta1")
	f.Expect(f.client.Create(t.Context(), dra)).To(Succeed())
	f.Expect(f.observe().Reason).To(Equal(v1alpha1.ReasonDRAStackActive))

	c := f.configurer() // one that runs while versions change
	f.Expect(cluster.Serve(t.Context(), clusters)).To(Succeed())
	_, err := c.Observe(t.Context())
	f.Expect(err).To(MatchError(pluginconfig.ErrNotSynced), "objects that cannot be read are not absent")
	f.Expect(err).To(MatchError(Equal("CustomResourceDefinition gpuclusters.nvidia.com serves no version, so GPUCluster is " +
		"not read yet; serve one of its versions, or delete it")))
	f.Expect(cluster.Serve(t.Context(), clusters, "v1beta2", "v1alpha1")).To(Succeed())
	f.Eventually(func() (string, error) {
		o, err := c.Observe(t.Context())
		if err != nil {
			return "", err
		}
		return o.Reason, nil
	}, "20s", "100ms").Should(Equal(v1alpha1.ReasonDRAStackActive))

	f.Expect(cluster.Serve(t.Context(), features, "v1")).To(Succeed())
	f.Eventually(func() (string, error) {
		_, served, err := c.NodeFeatures(t.Context())
		return served.String(), err
	}, "20s", "100ms").Should(Equal("nfd.k8s-sigs.io/v1, Kind=NodeFeature"))
	f.Expect(cluster.Serve(t.Context(), features, "v1", "v1alpha1")).To(Succeed())
	f.Eventually(func() (string, error) {
		_, served, err := c.NodeFeatures(t.Context())
		return served.Version, err
	}, "20s", "100ms").Should(Equal("v1alpha1"), "the version that we know, if it is served")
}

// inVersion reads an object in another version.
func (f *fixture) inVersion(version string, o *unstructured.Unstructured) *unstructured.Unstructured {
	f.t.Helper()
	now := nvidia(o.GetKind(), o.GetName())
	now.SetAPIVersion("nvidia.com/" + version)
	f.Expect(f.client.Get(f.ctx(), client.ObjectKeyFromObject(o), now)).To(Succeed())
	return now
}

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
