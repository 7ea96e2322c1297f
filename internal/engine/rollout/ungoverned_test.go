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
