// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// mixedByHand is a configuration of a user's under which NVIDIA's device plugin offers MIG instances.
const mixedByHand = "version: v1\nflags:\n  migStrategy: mixed\n"

// pluginAlone is a pod of NVIDIA's device plugin where there is no GPU Operator.
func pluginAlone(name string, now time.Time) cluster.Pod {
	return cluster.Pod{
		Namespace: "nvidia", Name: name, UID: name, Controller: "DaemonSet", NVIDIA: true, MountsConfig: true, Scheduled: now, Serves: true,
		Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
	}
}

// startsAlone brings such a pod to a node.
func (c *site) startsAlone(h *host, name string) {
	h.Pods = append(h.Pods, pluginAlone(name, c.Now))
	h.plugin.running, h.plugin.seen = false, maps.Clone(c.Configs)
}

// offersMIG is a node with a stand-alone plugin that offers MIG instances before the operator comes, and one made by hand if it names a profile.
func offersMIG(profile string) (*site, *host) {
	c, h := standAlone()
	c.Configs = map[string]string{"by-hand": mixedByHand}
	c.byHand, c.Plugin.Configs = mixedByHand, maps.Clone(c.Configs)
	h.plugin.running, h.plugin.seen = false, maps.Clone(c.Configs)
	if profile != "" {
		h.byHand(0, profile)
	}
	c.tick(time.Second)
	return c, h
}

// rests lets time pass in which the DaemonSet of a stand-alone plugin makes a pod once the former one is gone.
func (c *site) rests(h *host, seconds int) (d rollout.Decision) {
	for range seconds {
		if d = c.during(time.Second, time.Second); len(h.readers()) == 0 {
			c.pods++
			c.startsAlone(h, fmt.Sprint("plugin-", c.pods))
		}
	}
	return d
}

// bootsAlone boots a machine, where the plugin is earlier than the agent.
func (c *site) bootsAlone(h *host) {
	h.hardware.Update(func(n *sim.Node) { n.Boot++ })
	h.hardware.Reboot()
	h.plugin.running, h.lags = false, true
	c.tick(time.Second)
	h.lags = false
	c.tick(time.Second)
}

// failsOnAnother brings a node to where the change of a GPU that came instead of another one is undone, at the moment at which that is so or at rest.
func failsOnAnother(g *WithT, atRest bool) (c *site, h *host, former sim.GPU) {
	c, h = offersMIG("")
	c.setPolicy("research", mig(count("2g", 3)))
	isUpToDate(g, c.rests(h, 300).Nodes[0])
	h.remember()
	h.hardware.Update(func(n *sim.Node) { former = n.GPUs[0] })
	former.Instances = nil
	h.swap(0, sim.A100, 1)
	c.bootsAlone(h)
	h.broken = func(cluster.Snapshot) bool { return h.devices()[0].State.MIG }
	for at, was := 0, h.Pods[0].UID; at < 900; at, was = at+1, h.Pods[0].UID {
		if c.rests(h, 1); !atRest && at > 300 && h.Pods[0].UID != was && len(h.instances()) == 0 {
			break
		}
	}
	if atRest {
		isOffered(g, h, gpusOnly(1))
	}
	h.broken = nil
	return c, h, former
}

// TestAStandAlonePluginLooksAgainWhereNothingWasSelected: the instances that a user had made are made anew, under the configuration that the node
// has had all the time.
func TestAStandAlonePluginLooksAgainWhereNothingWasSelected(t *testing.T) {
	for name, ends := range map[string]func(*WithT, *site, *host){
		"the policy goes": func(g *WithT, c *site, h *host) {
			c.waitsUntil(g, func() bool { return len(h.instances()) == 3 })
			c.Policies = nil
		},
		"the change fails": func(g *WithT, c *site, h *host) {
			h.hardware.Fail = func(op sim.Op, _ string) error {
				if op == sim.OpCreateInstance && h.GPU.Spec.Devices[0].Sharing.Instances[0].Profile == "2g.10gb" {
					return sim.ErrCrash
				}
				return nil
			}
			isFailed(g, c.rests(h, 1200))
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := offersMIG("7g.40gb")
			before := h.instances()
			c.setPolicy("research", mig(count("2g", 3)))
			ends(g, c, h)
			c.rests(h, 300)
			g.Expect(h.instances()).To(HaveLen(1))
			g.Expect(h.instances()).NotTo(Equal(before))
			g.Expect(h.plugin.uuids).To(ConsistOf(h.instances()))
		})
	}
}

// TestAStandAlonePluginLooksAgainBeforeItsNodeIsReleased: a user has selected the former configuration before the policy goes.
func TestAStandAlonePluginLooksAgainBeforeItsNodeIsReleased(t *testing.T) {
	for _, profile := range []string{"", "7g.40gb"} {
		t.Run(profile, func(t *testing.T) {
			g := NewWithT(t)
			c, h := offersMIG(profile)
			h.Labels[v1alpha1.LabelConfig] = "by-hand"
			c.tick(time.Second)
			before := advertised(h)
			c.setPolicy("research", mig(count("2g", 3)))
			isUpToDate(g, c.rests(h, 300).Nodes[0])
			for range 2 {
				h.Labels[v1alpha1.LabelConfig] = "by-hand"
				c.rests(h, 60)
			}
			c.Policies = nil
			c.rests(h, 300)
			isForgotten(g, h)
			isOffered(g, h, before)
			g.Expect(h.plugin.uuids).To(ConsistOf(h.instances()))
			g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationInstances))
		})
	}
}

// TestAStandAlonePluginLooksAgainOnANodeThatJoinsWithTheLabel, as its pool has it. What is as asked is left alone.
func TestAStandAlonePluginLooksAgainOnANodeThatJoinsWithTheLabel(t *testing.T) {
	for profile, restarts := range map[v1alpha1.MIGProfile]int{"3g": 1, "7g": 0} {
		t.Run(string(profile), func(t *testing.T) {
			g := NewWithT(t)
			c, h := offersMIG("")
			c.setPolicy("research", mig(count(profile, 1)))
			isUpToDate(g, c.rests(h, 300).Nodes[0])
			b := c.add("b", sim.A100)
			b.Labels = map[string]string{v1alpha1.LabelConfig: h.Labels[v1alpha1.LabelConfig]}
			b.Pods = []cluster.Pod{pluginAlone("plugin-b", c.Now)}
			if restarts == 0 {
				b.byHand(0, "7g.40gb")
			}
			b.plugin.running, b.plugin.seen = false, maps.Clone(c.Configs)
			c.tick(time.Second)
			isUpToDate(g, c.rests(b, 600).Nodes[1])
			g.Expect(c.writes["action.DeletePod"]).To(Equal(restarts))
			g.Expect(b.plugin.uuids).To(ConsistOf(b.instances()))
		})
	}
}

// TestAStandAlonePluginThatHasSeenNoInstancesLooksAgain once there are some under the same key.
func TestAStandAlonePluginThatHasSeenNoInstancesLooksAgain(t *testing.T) {
	for name, happens := range map[string]func(*site, *host, sim.GPU){
		"the GPU that was replaced is back": func(c *site, h *host, former sim.GPU) {
			h.hardware.Update(func(n *sim.Node) { n.GPUs[0] = former })
			c.bootsAlone(h)
		},
		"the GPUNode is lost":      func(c *site, h *host, _ sim.GPU) { c.loseGPUNode(h) },
		"the last good is lost":    func(_ *site, h *host, _ sim.GPU) { h.GPU.Status.Rollout = v1alpha1.RolloutStatus{} },
		"it is tried again":        func(_ *site, h *host, _ sim.GPU) { h.annotate(v1alpha1.AnnotationRetry, "1") },
		"while the pod is changed": func(_ *site, h *host, _ sim.GPU) { h.annotate(v1alpha1.AnnotationRetry, "1") },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h, former := failsOnAnother(g, name != "while the pod is changed")
			happens(c, h, former)
			isUpToDate(g, c.rests(h, 600).Nodes[0])
			g.Expect(h.plugin.uuids).To(ConsistOf(h.instances()))
			c.bootsAlone(h)
			isUpToDate(g, c.rests(h, 600).Nodes[0])
			g.Expect(h.plugin.uuids).To(ConsistOf(h.instances()))
		})
	}
}
