// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// TestANodeThatKarpenterHasNotInitializedRejectsNoPod: it must have no taint of the operator's (MustStayUntainted), so the scheduler goes on binding pods to it,
// such as those for which Karpenter made it, while the device plugin stops for a change for another. Its kubelet publishes that up to 10 seconds later.
func TestANodeThatKarpenterHasNotInitializedRejectsNoPod(t *testing.T) {
	g, c := NewWithT(t), largeOn(t, "n0")
	h := c.hosts["n0"]
	h.Labels["karpenter.sh/nodepool"] = "gpus"
	c.version["n0"]++
	for range 60 {
		c.step()
	}
	g.Expect(c.isReady()).To(BeTrue())
	c.waits("7g.40gb", 0)
	for n := 0; n < 60 && h.Labels[pluginLabel] == "true"; n++ {
		c.schedule()
		c.decides()
		if c.acts(); h.Labels[pluginLabel] == "true" {
			c.passes(time.Second)
		}
	}
	if h.Labels[pluginLabel] == "true" || len(h.Taints) > 0 {
		return
	}
	g.Expect(h.Allocatable).To(HaveKeyWithValue("nvidia.com/mig-3g.20gb", int64(2)))
	c.waits("3g.20gb", 0) // of another tenant
	last := len(c.waiting) - 1
	c.binds(c.waiting[last], "n0")
	c.waiting = c.waiting[:last]
	for name, b := range c.bound {
		b.admitted = c.Now.Add(time.Second)
		c.bound[name] = b
	}
	for range 10 {
		c.passes(time.Second)
		c.admit()
		c.acts()
	}
	g.Expect(c.broken).To(BeEmpty(), strings.Join(c.told[8:min(len(c.told), 50)], "\n"))
}
