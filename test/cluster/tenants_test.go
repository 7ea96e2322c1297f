// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"maps"
	"math/rand/v2"
	"slices"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// tenant is a namespace in which a user with the role edit creates what they like.
const tenant = "tenant"

// tenantEvent lets a pod of a tenant come to a node that uses no GPU, and looks like one of NVIDIA's or of Node Feature
// Discovery's. It stays until the history ends.
func (s *run) tenantEvent(random *rand.Rand) {
	p := s.some(random)
	if p.off {
		return
	}
	looks := map[string]func(*corev1.Pod){
		"a workload of the validator": func(p *corev1.Pod) { p.Labels[cluster.LabelApp] = "nvidia-cuda-validator" },
		"Node Feature Discovery":      func(p *corev1.Pod) { p.Labels["app.kubernetes.io/name"] = "node-feature-discovery" },
	}
	for _, label := range cluster.DeployLabels() {
		looks[label] = func(p *corev1.Pod) { p.Spec.NodeSelector[label] = "true" }
	}
	names := slices.Sorted(maps.Keys(looks))
	look := names[random.IntN(len(names))]
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenant, GenerateName: "tenant-", Labels: map[string]string{}},
		Spec: corev1.PodSpec{
			NodeName: p.name, NodeSelector: map[string]string{}, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/none"}},
		},
	}
	looks[look](pod)
	owned := random.IntN(2) == 0
	if owned {
		pod.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: "apps/v1", Kind: "DaemonSet", Name: "nvidia-device-plugin-daemonset", UID: "theirs", Controller: new(true),
		}}
	}
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}
	s.Eventually(func() error { return s.client.Create(s.t.Context(), space) }, patience, pollEvery).
		Should(Or(Succeed(), Satisfy(apierrors.IsAlreadyExists)))
	s.Eventually(func() error { return s.client.Create(s.t.Context(), pod) }, patience, pollEvery).Should(Succeed())
	s.tell("pod %s of a tenant comes to %s, and looks like %s; with a controller: %v", pod.Name, p.name, look, owned)
}
