// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestTheDevicePluginThatStopsLastHasItsTime: where DCGM was stopped for the change half an hour ago, the device plugin that is stopped before the node takes
// pods again has as long to end as where nothing was stopped before. What the kubelet publishes follows.
func TestTheDevicePluginThatStopsLastHasItsTime(t *testing.T) {
	for _, monitors := range []bool{false, true} {
		t.Run(fmt.Sprint("monitored ", monitors), func(t *testing.T) {
			c := largeOn(t, "n0")
			h := c.hosts["n0"]
			if monitors {
				h.monitored()
			}
			for range 30 {
				c.step()
			}
			c.waits("7g.40gb", 0)
			c.asks(h)
			h.converge()
			h.AgentReady, c.waiting = false, nil
			c.version["n0"]++
			for n := 0; n < 1000 && h.HasChangingTaint(); n++ {
				c.decides()
				for range 10 { // within a second or so, in which no pod ends
					c.acts()
				}
				if !h.HasChangingTaint() && h.Allocatable["nvidia.com/mig-3g.20gb"] > 0 {
					t.Errorf("the node takes pods while it offers instances that are gone:\n%s", strings.Join(c.told[8:min(len(c.told), 60)], "\n"))
				}
				c.passes(5 * time.Second)
			}
		})
	}
}
