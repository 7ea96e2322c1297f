// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAGPUNodeThatWasMadeAnewWaitsForItsPolicy: the operator's definitions are installed again after they were deleted
// with all objects, or a backup is restored, and the policies follow minutes later.
func TestAGPUNodeThatWasMadeAnewWaitsForItsPolicy(t *testing.T) {
	for name, lost := range map[string]func(*host){
		"without a spec":        func(h *host) { h.GPU.Spec = v1alpha1.GPUNodeSpec{} },
		"with that of a backup": func(*host) {},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			c.run(90)
			c.tick(time.Hour)
			selected, policies := h.Labels[v1alpha1.LabelConfig], c.Policies
			stands := func() bool {
				return h.Labels[v1alpha1.LabelConfig] == selected && h.Labels[pluginLabel] == "true" && len(h.Taints) == 0 && h.devices()[0].State.MIG
			}
			c.Policies = nil
			anew := func() {
				h.GPU.UID, h.GPU.CreationTimestamp = "another", metav1.NewTime(c.Now)
				h.GPU.Status.Rollout = v1alpha1.RolloutStatus{}
				lost(h)
			}
			anew()
			for ends := c.Now.Add(timing.PoliciesReturn - time.Minute); c.Now.Before(ends); c.tick(10 * time.Second) {
				c.reconcile()
				g.Expect(stands()).To(BeTrue(), "after %s", c.Now.Sub(h.GPU.CreationTimestamp.Time))
			}
			g.Expect(h.waits()).To(ContainSubstring("made anew"))
			c.Policies = policies
			for range 90 {
				c.reconcile()
				c.tick(10 * time.Second)
				g.Expect(stands()).To(BeTrue(), "under its policy again")
			}
			c.Policies = nil
			c.run(90)
			g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig), "a policy that is deleted later releases it at once")

			c.Policies = policies
			c.run(90)
			c.tick(time.Hour)
			c.Policies = nil
			anew()
			c.tick(timing.PoliciesReturn)
			c.run(90)
			g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig), "none has come back")
			g.Expect(h.GPU.Spec).To(BeZero())
		})
	}
}

// TestAPolicyThatFailedBeforeItAskedForAnythingIsReleasedAtOnce: the GPUNode of a new machine is as young as one that was
// made anew, and has a baseline, but nothing was done to the node under another one.
func TestAPolicyThatFailedBeforeItAskedForAnythingIsReleasedAtOnce(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.nfd.denies = true
	h := c.add("a", sim.A100)
	h.GPU.CreationTimestamp = metav1.NewTime(c.Now)
	c.tick(time.Second)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mps(4))}
	d, _ := c.run(60)
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonNodeFeatureIgnored))
	g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())

	c.Policies = nil
	d, _ = c.run(30)
	g.Expect(c.Now.Sub(h.GPU.CreationTimestamp.Time)).To(BeNumerically("<", timing.PoliciesReturn))
	g.Expect(d.Nodes).To(BeEmpty())
	g.Expect(d.ConfigurePlugin).To(BeFalse(), "the ClusterPolicy is restored")
	g.Expect(h.GPU.Spec).To(BeZero())
}
