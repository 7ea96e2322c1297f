// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// waitsUntil lets seconds pass, at most 600, until something is.
func (c *site) waitsUntil(g *WithT, is func() bool) {
	for i := 0; !is(); i++ {
		g.Expect(i).To(BeNumerically("<", 600))
		c.tick(time.Second)
		c.reconcile()
	}
}

// failsNothing looks for so many seconds that no change fails.
func (c *site) failsNothing(g *WithT, seconds int) {
	for range seconds {
		for _, n := range c.reconcile().Nodes {
			g.Expect(n.State).NotTo(Equal(node.Failed), n.Message)
		}
		c.tick(time.Second)
	}
}

// TestARestartThatWasRecordedHasItsTime: the controller has recorded in time that it restarts what offers the GPUs, and is away before it deletes the
// pod. It deletes it when it is back, and what starts then is given time to offer anything.
func TestARestartThatWasRecordedHasItsTime(t *testing.T) {
	for name, world := range map[string]func() (*site, *host){
		"the DRA driver": evictingOnDRA,
		"the device plugin, which offers what it did until it starts anew": func() (*site, *host) {
			c, h := toMIG(evicting)
			c.Policies[0].Spec.Sharing = timeSlicing(4)
			c.tick(time.Hour) // its pod is an old one
			return c, h
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := world()
			recorded := func() bool { return strings.Contains(h.Annotations[v1alpha1.AnnotationInstances], "@") }
			for i := 0; !recorded(); i++ {
				g.Expect(i).To(BeNumerically("<", 600))
				c.tick(time.Second)
				if h.Allocatable["nvidia.com/gpu"] == 8 {
					h.Allocatable["nvidia.com/gpu"] = 2
				}
				c.reconcile()
			}
			c.tick(6 * time.Minute)
			c.LeadsSince = c.Now
			for i := range 300 {
				for _, n := range c.reconcile().Nodes {
					g.Expect(n.State).NotTo(Equal(node.Failed), n.Message)
				}
				if i > 2 { // a pod takes a moment to start
					c.tick(time.Second)
				}
			}
			g.Expect(c.ready()).To(Equal(1))
		})
	}
}

// TestWhatStartsWhenTheControllerIsBackHasItsTime: the controller was away over the deadline for verifying, and what offers the GPUs was replaced in the
// same maintenance, as by an upgrade of its chart. It starts just now, and looks at the GPUs when it does.
func TestWhatStartsWhenTheControllerIsBackHasItsTime(t *testing.T) {
	for name, test := range map[string]struct {
		world    func() (*site, *host)
		replaces func(*site, *host)
	}{
		"the DRA driver": {
			world:    evictingOnDRA,
			replaces: func(c *site, h *host) { h.replaceDriver(c) },
		},
		"the device plugin": {
			world: func() (*site, *host) {
				c, h := toMIG(evicting)
				c.Policies[0].Spec.Sharing = timeSlicing(4)
				c.tick(time.Hour)
				return c, h
			},
			replaces: func(c *site, h *host) {
				c.deletePod(h, h.of(pluginLabel).UID)
				c.daemonSets(h)
				h.Allocatable["nvidia.com/gpu"] = 0
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := test.world()
			c.waitsUntil(g, func() bool { return h.Annotations[v1alpha1.AnnotationSelected] != "" })
			c.Now = c.Now.Add(6 * time.Minute)
			test.replaces(c, h)
			c.LeadsSince = c.Now
			c.failsNothing(g, 300)
			g.Expect(c.ready()).To(Equal(1))
		})
	}
}

// TestADrainGoesOnAfterTheControllerWasAway: the pod that was waited for ended while the controller was away, so the node is idle when it is back, and
// nothing failed. The policy has no failed node, and the node after it has its turn.
func TestADrainGoesOnAfterTheControllerWasAway(t *testing.T) {
	for _, away := range []time.Duration{10 * time.Minute, 20 * time.Minute, time.Hour} {
		for _, deleted := range []bool{false, true} {
			t.Run(away.String(), func(t *testing.T) {
				g := NewWithT(t)
				c, h := toMIG()
				c.add("b", sim.A100)
				if deleted {
					c.run(120)
					c.hold(h, "train", 0, h.devices()[0].State.Instances[0].ID)
					c.tick(time.Minute)
					c.Policies = nil
				} else {
					c.hold(h, "train", 0, gpu.WholeGPU)
					c.tick(time.Minute)
				}
				c.steps(20)
				g.Expect(h.isKept()).To(BeTrue(), "it is drained")
				c.tick(away)
				c.end(h, "train")
				c.tick(time.Minute)
				c.LeadsSince = c.Now
				for range 300 {
					for _, n := range c.reconcile().Nodes {
						g.Expect(n.State).NotTo(Equal(node.Failed), "%s (deleted: %v)", n.Message, deleted)
					}
					c.tick(time.Second)
				}
				if deleted {
					g.Expect(h.GPU.Spec.Baseline).To(BeNil())
				} else {
					g.Expect(c.ready()).To(Equal(2))
				}
			})
		}
	}
}

// TestAnAgentThatWasLostHasItsTimeHoweverLongItWasLost: a machine goes off just after its agent was asked, and comes back. "An agent that is lost …
// begins the time of the agent anew" (docs/dev/contracts.md), whether it was lost for ten minutes, for twenty or for fifty, and whether the controller
// was there or not, as when the operator is uninstalled and installed again.
func TestAnAgentThatWasLostHasItsTimeHoweverLongItWasLost(t *testing.T) {
	for name, world := range map[string]func() (*site, *host){
		"MIG":                    func() (*site, *host) { return toMIG(evicting) },
		"MPS":                    func() (*site, *host) { c, h := toMIG(); c.Policies[0].Spec.Sharing = mps(4); return c, h },
		"MIG, on the DRA driver": evictingOnDRA,
	} {
		for _, away := range []time.Duration{10 * time.Minute, 20 * time.Minute, 50 * time.Minute} {
			for lost, passes := range map[string]func(*site){
				"the agent alone":              func(c *site) { c.during(away, 5*time.Second) },
				"the agent and the controller": func(c *site) { c.tick(away); c.LeadsSince = c.Now },
			} {
				t.Run(name+"/"+away.String()+"/"+lost, func(t *testing.T) {
					g := NewWithT(t)
					c, h := world()
					c.waitsUntil(g, func() bool { return h.GPU.Spec.Devices != nil })
					h.AgentReady = false
					passes(c)
					h.AgentReady, h.AgentSince = true, c.Now // it reports a moment later
					c.failsNothing(g, 1200)
					g.Expect(c.ready()).To(Equal(1))
					g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationInterrupted))
				})
			}
		}
	}
}

// TestAMachineThatGoesOffWhileItIsVerifiedHasItsTime: it goes off just after its config was selected, and its pods start when it is back, the agent a
// moment before the device plugin. The controller sees all of that. The machine's clock, by which the kubelet says since when the agent is Ready, may be a
// little ahead.
func TestAMachineThatGoesOffWhileItIsVerifiedHasItsTime(t *testing.T) {
	for away, ahead := range map[time.Duration]time.Duration{
		4 * time.Minute: 0, 7 * time.Minute: 0, 8 * time.Minute: 10 * time.Second, 20 * time.Minute: 0, 40 * time.Minute: 0,
	} {
		t.Run(away.String(), func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting)
			for i := 0; h.Annotations[v1alpha1.AnnotationSelected] == ""; i++ {
				g.Expect(i).To(BeNumerically("<", 60))
				c.tick(time.Second)
				c.reconcile()
			}
			c.daemonSets(h) // the pod is made, and has not started yet
			h.off, h.AgentReady, h.plugin.running = true, false, false
			c.offerNothing(h)
			c.during(away, 5*time.Second)
			h.AgentReady, h.AgentSince = true, c.Now.Add(ahead)
			for i := range 600 {
				for _, n := range c.reconcile().Nodes {
					g.Expect(n.State).NotTo(Equal(node.Failed), "%d s after it is back: %s", i, n.Message)
				}
				h.off = i < 3 // NVIDIA's programs take a moment to start
				c.tick(time.Second)
			}
			g.Expect(c.ready()).To(Equal(1))
		})
	}
}

// TestMIGManagerIsAskedAfterTheControllerWasAway: it was not asked yet, since what it is to apply was not to be seen in its pod.
func TestMIGManagerIsAskedAfterTheControllerWasAway(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := withManager(c, sim.A100)
	c.setPolicy("research", byManager(count("1g", 7)), evicting)
	c.waitsUntil(g, func() bool { return h.GPU.Spec.MIGConfigName != "" })
	c.tick(20 * time.Minute)
	c.LeadsSince = c.Now
	c.failsNothing(g, 600)
	g.Expect(c.ready()).To(Equal(1))
}
