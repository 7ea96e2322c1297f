// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
)

// TestTheReserveIsNoneOfANodeThatAnAutoscalerRemoves: neither Karpenter nor Cluster Autoscaler (without --cordon-node-before-terminating) cordons it.
func TestTheReserveIsNoneOfANodeThatAnAutoscalerRemoves(t *testing.T) {
	for _, taint := range []string{"karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"} {
		t.Run(taint, func(t *testing.T) {
			g, p := NewWithT(t), applying()
			of := p.Spec.Sharing.MIG.Layouts[0].OnDemand
			of.Profiles, of.Reserve = []v1alpha1.MIGProfile{"3g", "7g"}, []v1alpha1.MIGReserve{{Profile: "3g", Count: 2}}
			a, b := a100s(t, "a", 1), a100s(t, "b", 1)
			rests(&a)
			rests(&b)
			a.Taints = []corev1.Taint{{Key: taint, Effect: corev1.TaintEffectNoSchedule}}
			s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a, b}}
			decided, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
			g.Expect(decided).NotTo(HaveKey("b"), "%s: the last idle 3g that a pod could have go", is.Message)
		})
	}
}
