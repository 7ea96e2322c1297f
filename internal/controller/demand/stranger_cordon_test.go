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

// TestTheReserveIsMadeWherePodsCanHaveIt: not on a node that takes none, where it does not count once it is there.
func TestTheReserveIsMadeWherePodsCanHaveIt(t *testing.T) {
	for _, taint := range []string{"", corev1.TaintNodeUnschedulable, "karpenter.sh/disrupted"} {
		t.Run(taint, func(t *testing.T) {
			g, p := NewWithT(t), applying()
			p.Spec.Sharing.MIG.Layouts[0].Fill = ""
			p.Spec.Sharing.MIG.Layouts[0].Instances = []v1alpha1.MIGInstances{{Profile: "3g", Count: 1}}
			of := p.Spec.Sharing.MIG.Layouts[0].OnDemand
			of.Profiles, of.Reserve = []v1alpha1.MIGProfile{"1g", "3g"}, []v1alpha1.MIGReserve{{Profile: "1g", Count: 1}}
			a, b := a100s(t, "a", 1), a100s(t, "b", 1)
			for _, n := range []*cluster.Node{&a, &b} {
				n.GPU.Status.Devices[0].Instances = n.GPU.Status.Devices[0].Instances[:1]
				rests(n)
			}
			if taint != "" {
				a.Taints = []corev1.Taint{{Key: taint, Effect: corev1.TaintEffectNoSchedule}}
			}
			s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a, b}}
			decided, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, nil)
			if taint == "" {
				g.Expect(len(decided["a"])+len(decided["b"])).To(Equal(1), is.Message)
				return
			}
			g.Expect(decided["b"]).To(HaveLen(1), "%v", decided)
			g.Expect(decided["a"]).To(BeEmpty())
		})
	}
}
