// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestMIGManagerIsNotWaitedForBecauseAClockWasAhead: another controller, whose clock was a day ahead, wrote since when
// mig-manager was asked.
func TestMIGManagerIsNotWaitedForBecauseAClockWasAhead(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := releasedTo(g, c, "all-1g.5gb")
	h.mishap = func(string) string { return "hangs" }
	c.Now = c.Now.Add(-24 * time.Hour)
	d := c.during(45*time.Minute, 10*time.Second)
	g.Expect(d.ConfigureMIGManager).To(BeFalse(), "%+v", d.Nodes)
	g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
	g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
}

// TestTheReasonToWaitForMIGManagerHoldsBesideOtherNodes: where mig-manager partitions another node the ClusterPolicy is
// not restored.
func TestTheReasonToWaitForMIGManagerHoldsBesideOtherNodes(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := releasedTo(g, c, "all-1g.5gb")
	h.mishap = func(string) string { return "hangs" }
	other := c.add("b", sim.A100)
	other.acts, other.Labels["pool"] = true, "other"
	other.Labels[v1alpha1.LabelMIGManager], other.Labels[v1alpha1.LabelMIGConfig] = "true", "all-disabled"
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("other", byManager(count("2g", 3)), evicting, func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "other"}}
	})}
	d := c.during(5*time.Minute, time.Second)
	g.Expect(d.Nodes).To(HaveLen(2))
	g.Expect(d.Nodes[0].State).To(Equal(node.Finishing), "%+v", d.Nodes[0])
	g.Expect(d.Nodes[0].Message).NotTo(ContainSubstring("then the ClusterPolicy is restored"))
	d = c.during(25*time.Minute, 10*time.Second)
	g.Expect(d.ConfigureMIGManager).To(BeTrue())
}

// TestMIGManagerKeepsItsPodBesideTheNextPolicy: one that governs the node before mig-manager has answered.
func TestMIGManagerKeepsItsPodBesideTheNextPolicy(t *testing.T) {
	for name, next := range map[string]v1alpha1.Sharing{"TimeSlicing": timeSlicing(4), "MIG": mig(count("3g", 2)), "MPS": mps(4)} {
		for _, outcome := range []string{"", "hangs", "fails"} {
			for _, after := range []int{1, 5} {
				t.Run(name+outcome, func(t *testing.T) {
					g := NewWithT(t)
					c := newSite()
					h := releasedTo(g, c, "all-1g.5gb")
					h.mishap = func(string) string {
						if c.Plugin.MIGReady { // its next pod succeeds
							return outcome
						}
						return ""
					}
					for range after {
						c.tick(time.Second)
						c.reconcile()
					}
					c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("next", next, evicting)}
					d := c.during(40*time.Minute, 5*time.Second)
					g.Expect(d.ConfigureMIGManager).To(BeFalse())
					g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), "%+v", d.Nodes[0])
					g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
					if outcome != "hangs" {
						g.Expect(h.mistakes).To(BeEmpty())
					}
				})
			}
		}
	}
}
