// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestWhatNoPodWaitsForWaitsForNoIdleness: a GPU that has what the policy does not let it have any more, or whose GPUNode was lost, goes to rest once nobody
// uses it. Meanwhile its node is not Ready, so that nothing of it, such as its other GPU, is made for pods that wait.
func TestWhatNoPodWaitsForWaitsForNoIdleness(t *testing.T) {
	for name, happens := range map[string]func(c *applied, h *host){
		"7g is not allowed any more": func(c *applied, _ *host) {
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand.Profiles = []v1alpha1.MIGProfile{"2g", "3g"}
			c.Policies[0].Generation++
		},
		"the GPUNode is made anew": func(c *applied, h *host) { c.makeGPUNode(h) },
	} {
		t.Run(name, func(t *testing.T) {
			g, c := NewWithT(t), largeOf(t, []sim.Model{sim.A100, sim.A100}, "n0")
			h := c.hosts["n0"]
			of := c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand
			of.IdleSeconds, of.Profiles = 300, []v1alpha1.MIGProfile{"2g", "3g", "7g"}
			c.Policies[0].Generation++
			for uuid := range c.lastHeld {
				c.lastHeld[uuid] = c.Now.Add(-5 * time.Hour)
			}
			c.reportHeld(h, h.devices())
			c.version["n0"]++
			c.waits("7g.40gb", 0)
			for range 120 {
				c.step()
			}
			g.Expect(c.users()+len(c.bound)).To(BeZero(), strings.Join(c.told, "\n"))
			c.leave()
			for range 60 {
				c.step()
			}
			g.Expect(c.isReady()).To(BeTrue())
			c.edited = true
			happens(c, h)
			c.version["n0"]++
			c.waits("2g.10gb", 0)
			for range 1200 {
				c.step()
			}
			t.Log(h.waits(), c.isReady())
			g.Expect(c.users()).To(BeZero(), "the pod, for which the other GPU has room that has been idle for hours, waits after 20 minutes:\n%s", strings.Join(c.told[max(0, len(c.told)-12):], "\n"))
		})
	}
}
