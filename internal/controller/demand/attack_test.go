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

// TestTheReserveIsNoneOfALostNode, or of one that is cordoned, such as one that an autoscaler removes: there no pod can have it.
func TestTheReserveIsNoneOfALostNode(t *testing.T) {
	for _, taint := range []string{"", corev1.TaintNodeUnreachable, corev1.TaintNodeUnschedulable} {
		t.Run(taint, func(t *testing.T) {
			g, p := NewWithT(t), applying()
			of := p.Spec.Sharing.MIG.Layouts[0].OnDemand
			of.Profiles, of.Reserve = []v1alpha1.MIGProfile{"3g", "7g"}, []v1alpha1.MIGReserve{{Profile: "3g", Count: 2}}
			a, b := a100s(t, "a", 1), a100s(t, "b", 1)
			rests(&a)
			rests(&b)
			if taint != "" {
				a.Taints = []corev1.Taint{{Key: taint, Effect: corev1.TaintEffectNoSchedule}}
			}
			s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a, b}}
			decided, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
			g.Expect(len(decided["a"])+len(decided["b"])).To(Equal(map[bool]int{true: 1, false: 0}[taint == ""]), "%s %v", is.Message, decided)
		})
	}
}
