// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// TestANodeTakesNoPodsBeforeItsDevicePluginIsBack: a change is taken back, as when it fails or the feature gate is turned off, and the agent makes the former
// instances anew. The device plugin's pod, which lists what is gone, is deleted. Until another one has registered the kubelet refuses pods, and it publishes that
// up to 10 seconds later, so that the node still offers as many as it must.
func TestANodeTakesNoPodsBeforeItsDevicePluginIsBack(t *testing.T) {
	c := largeOn(t, "n0")
	h := c.hosts["n0"]
	c.waits("7g.40gb", 0)
	c.asks(h)
	h.converge()
	h.GPU.Status.Demand, c.waiting = nil, nil
	c.version["n0"]++
	for n := 0; n < 60 && h.HasChangingTaint(); n++ {
		for range 10 { // within a second or so, in which no pod starts
			if c.acts(); !h.HasChangingTaint() && !slices.ContainsFunc(h.Pods, playedBy(pluginLabel)) {
				t.Fatalf("the node takes pods, and no device plugin is there:\n%s", strings.Join(c.told[8:], "\n"))
			}
		}
		c.passes(time.Second)
	}
}
