// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
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

// Without a fabric manager, the GPUs behind NVSwitches are reset together, which the agent learns from a reset.
func TestGPUsThatAreResetTogetherAreDrainedTogether(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100, sim.A100)
	h.hardware.Update(func(n *sim.Node) { n.NVSwitch = true })
	h.report()
	c.hold(h, "train", 1, gpu.WholeGPU)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", firstGPU(), func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Rollout.Drain.Mode = v1alpha1.DrainModeEvict
	})}
	for range 60 {
		c.reconcile()
		c.tick(time.Second)
		if len(h.devices()[0].ResetPeers) > 0 {
			break
		}
		g.Expect(c.evicted).To(BeEmpty(), "the other GPU is not concerned before a reset has told")
	}
	d, _ := c.run(400)
	g.Expect(c.evicted).To(Equal([]string{"train"}))
	g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), "%+v", d.Nodes[0])
	g.Expect(advertised(h)).To(Equal(map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-1g.5gb": 7}))
}
