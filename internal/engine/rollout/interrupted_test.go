// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// TestWhatInterruptsAChangeGivesNobodyWhatIsGone: the agent has destroyed what the device plugin lists, and reports later.
func TestWhatInterruptsAChangeGivesNobodyWhatIsGone(t *testing.T) {
	for name, happens := range map[string]func(c *applied, h *host){
		"nothing":                           func(*applied, *host) {},
		"the policy is deleted and retains": func(c *applied, _ *host) { c.Policies = nil },
		"the policy is deleted":             func(c *applied, _ *host) { c.Policies = nil },
		"the policy is paused":              func(c *applied, _ *host) { c.Policies[0].Spec.Rollout.Paused = true; c.Policies[0].Generation++ },
		"the GPUNode is made anew":          func(c *applied, h *host) { c.makeGPUNode(h) },
		"the node opts out":                 func(_ *applied, h *host) { h.Labels["nvidia.com/gpu.deploy.operands"] = "false" },
		"the plugin restarts":               func(c *applied, h *host) { c.deletePod(h, h.of(pluginLabel).UID) },
		"the driver fails":                  func(c *applied, h *host) { c.fails(h); c.fails(h); c.fails(h) },
		"another leads":                     func(c *applied, _ *host) { c.leads() },
		"a GPU is unhealthy": func(_ *applied, h *host) {
			h.sick, h.Allocatable["nvidia.com/mig-3g.20gb"] = map[string]bool{h.devices()[0].UUID: true}, 0
			h.unallocatable("nvidia.com/mig-3g.20gb", 2)
		},
	} {
		for _, monitors := range []bool{false, true} {
			for _, agent := range []string{"late", "away"} {
				t.Run(fmt.Sprint(name, monitors, agent), func(t *testing.T) {
					c := largeOn(t, "n0")
					h := c.hosts["n0"]
					if name == "the policy is deleted and retains" {
						c.Policies[0].Spec.ReleasePolicy = v1alpha1.ReleasePolicyRetain
						c.Policies[0].Generation++
					}
					if monitors {
						h.monitored()
					}
					for range 30 {
						c.step()
					}
					c.waits("7g.40gb", 0)
					c.asks(h)
					h.converge()
					h.lags, h.AgentReady = agent == "late", agent == "late"
					c.waiting = nil
					happens(c, h)
					c.version["n0"]++
					c.serves(h, 8, time.Second)
					if agent == "away" {
						c.serves(h, 600, 5*time.Second)
					}
					h.lags, h.AgentReady = false, true
					c.serves(h, 300, 2*time.Second)
					if c.broken != "" {
						t.Error(c.broken, "\n", strings.Join(c.told[8:min(len(c.told), 60)], "\n"))
					}
				})
			}
		}
	}
}

// serves lets time pass in which another pod always waits.
func (c *applied) serves(h *host, steps int, d time.Duration) {
	for range steps {
		if c.users() == 0 && len(c.bound) == 0 && len(c.late) == 0 {
			for _, p := range h.Pods {
				if p.Namespace == "user" {
					c.end(h, p.Name)
				}
			}
			c.waits("3g.20gb", 0)
		}
		c.steps(d)
	}
}
