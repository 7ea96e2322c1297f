// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// NVIDIA's chart of the device plugin has a value config.default, which becomes DEFAULT_CONFIG of config-manager and counts before the key that
// is called default, and config.fallbackStrategies.
func TestTheKeyOfNodesWithoutALabel(t *testing.T) {
	reads := func(name string, env ...corev1.EnvVar) client.Object {
		return &appsv1.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: name},
			Spec: appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "nvidia-device-plugin-sidecar", Env: env}, {Name: "nvidia-device-plugin-ctr"}},
				Volumes: []corev1.Volume{{Name: "available-configs", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
					LocalObjectReference: corev1.LocalObjectReference{Name: "config"},
				}}}},
			}}},
		}
	}
	env := func(name, value string) corev1.EnvVar { return corev1.EnvVar{Name: name, Value: value} }
	for name, c := range map[string]struct {
		keys    []string
		objects []client.Object
		want    string
	}{
		"config.default, and no key is called default": {[]string{"config0", "config1"}, []client.Object{reads("plugin", env("DEFAULT_CONFIG", "config0"))}, "config0"},
		"config.default beside the key default":        {[]string{"default", "many"}, []client.Object{reads("plugin", env("DEFAULT_CONFIG", "many"))}, "many"},
		"the key default":                              {[]string{"default", "many"}, []client.Object{reads("plugin", env("DEFAULT_CONFIG", ""))}, "default"},
		"the only key":                                 {[]string{"many"}, []client.Object{reads("plugin", env("FALLBACK_STRATEGIES", "named,single"))}, "many"},
		"no key at all":                                {[]string{"many"}, []client.Object{reads("plugin", env("FALLBACK_STRATEGIES", "empty"))}, ""},
		"no DaemonSet":                                 {[]string{"many"}, nil, "many"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: "config"}, Data: map[string]string{}}
			for _, key := range c.keys {
				configMap.Data[key] = "version: v1"
			}
			key, err := fallback(t.Context(), fake.NewClientBuilder().WithObjects(c.objects...).Build(), configMap)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(key).To(Equal(c.want))
		})
	}
	g := NewWithT(t)
	both := fake.NewClientBuilder().WithObjects(reads("a", env("DEFAULT_CONFIG", "x")), reads("b", env("DEFAULT_CONFIG", "y"))).Build()
	_, err := fallback(t.Context(), both, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: "config"}})
	g.Expect(err).To(MatchError(errDefaultsDiffer))
}
