// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// watching are watches of an API server that does not answer.
func watching(t *testing.T) *watches {
	t.Helper()
	seen, err := newWatches(&rest.Config{Host: "http://127.0.0.1:1"})
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return seen
}

// TestThePageForbidsNothingThatItHasNotRead: the page reads no NodeFeatures, which says nothing about whether there are
// any.
func TestThePageForbidsNothingThatItHasNotRead(t *testing.T) {
	g := NewWithT(t)
	seen := watching(t)
	n := newNode(t, "a", sim.T4)
	n.Labels[cluster.LabelMPSCapable] = "false"
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: n.Labels}}
	p := policy(t, "shared", `{sharing: {strategy: MPS, mps: {replicas: 4}}}`) // which the controller has not observed yet
	n.GPU.Name = "a"
	for k, o := range map[*kind]any{seen.policies: &p, seen.gpuNodes: &n.GPU, seen.nodes: object} {
		g.Expect(k.GetStore().Add(o)).To(Succeed())
		seen.touch(o)
	}
	s, _, _ := seen.snapshot(now)
	cards := sight{snapshot: s}.page().Nodes
	g.Expect(cards).To(HaveLen(1))
	g.Expect(cards[0].Policy).To(Equal("shared"))
	g.Expect(cards[0].State).NotTo(ContainSubstring(v1alpha1.ReasonNoNodeFeatures))
}
