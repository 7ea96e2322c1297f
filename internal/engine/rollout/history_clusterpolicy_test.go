// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

func (c *run) HasClusterPolicy() bool { return c.Plugin.ClusterPolicy && c.Plugin.Reason == "" }

// DeleteClusterPolicy: until the status of the next one tells where the GPU Operator runs, there is no device plugin to configure.
func (c *run) DeleteClusterPolicy(random *rand.Rand) {
	c.Plugin.Reason, c.Plugin.Message, c.Plugin.Ready = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy", false
	c.reconciles(1 + random.IntN(10))
}

// ApplyChart lets the ClusterPolicy be as the chart of the GPU Operator writes it, until the operator has patched it.
func (c *run) ApplyChart(random *rand.Rand) {
	c.Plugin.Reason, c.Plugin.Message = "", ""
	c.inForce(func() { c.reconciles(1 + random.IntN(5)) })
	c.tell("the ClusterPolicy names our ConfigMap")
}

// standBackEvent lets another controller write the ClusterPolicy as the chart has it, and again when the operator has
// patched it, so that the operator stands back, for up to 65 minutes. A change that is under way does not fail by that:
// another layout of the GPUs would be offered no better.
func (c *run) standBackEvent(random *rand.Rand) {
	if !c.Plugin.ClusterPolicy || c.Plugin.Reason != "" {
		return
	}
	began := c.Now
	c.tell("another controller keeps the ClusterPolicy as the chart writes it")
	c.Plugin.Message = "another controller keeps the ClusterPolicy"
	c.inForce(func() { c.rest(time.Duration(1+random.IntN(65))*time.Minute, 150) })
	c.Plugin.Message = ""
	c.tell("and stops; the ClusterPolicy names our ConfigMap")
	for _, h := range c.all() {
		f := h.GPU.Status.Rollout.Failed
		if f != nil && f.Reason == v1alpha1.ReasonNotAdvertised && f.Time.After(began) && !h.driver.serves {
			c.breaks("harmless", "the change of %s failed for the ClusterPolicy of another controller: %s", h.Name, f.Message)
		}
	}
}

// inForce lets the ClusterPolicy be as the chart of the GPU Operator writes it while something happens. With
// mig.strategy: single, NVIDIA's device plugin offers nothing on a node with MIG instances. Both changes start it anew
// on every node.
func (c *run) inForce(happens func()) {
	var single []*host
	for _, h := range c.all() {
		if h.broken == nil {
			h.broken = func(s cluster.Snapshot) bool { return !s.Plugin.Ready && len(h.instances()) > 0 }
			single = append(single, h)
		}
	}
	c.Plugin.Ready = false
	c.rollsOut()
	happens()
	for _, h := range single {
		h.broken = nil
	}
	c.Plugin.Ready, c.Plugin.Overruled = true, c.Now
	c.rollsOut()
}

// optOutEvent takes NVIDIA's programs off a node for a while, by the label for that. The GPU Operator removes every
// deploy label then, whatever its value, that of the agent too, and again when another controller sets one. It sets
// them when the node is no longer opted out. Nobody is told to set what it removes.
func (c *run) optOutEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || !h.down.IsZero() || h.upgrade.goesOn() || !c.Plugin.ClusterPolicy || h.driver.serves || !h.AgentReady {
		return
	}
	var had []string
	off := func() {
		for _, label := range append(cluster.DeployLabels(), v1alpha1.LabelRunsAgent, v1alpha1.LabelMIGManager) {
			if _, has := h.Labels[label]; has {
				had = append(had, label)
				delete(h.Labels, label)
				c.version[h.Name]++
			}
		}
	}
	c.tell("%s opts out of NVIDIA's programs", h.Name)
	h.Labels[optOutLabel], h.AgentReady = "false", false
	for n := range 3 + random.IntN(12) {
		off()
		c.step(true)
		c.lapse(time.Second)
		if n > 1 && strings.Contains(h.waits(), "set it to true") {
			c.breaks("truth", "%s has opted out, and a person is told what the GPU Operator undoes: %s", h.Name, h.waits())
		}
	}
	c.tell("%s opts in again", h.Name)
	delete(h.Labels, optOutLabel)
	for _, label := range had {
		h.Labels[label] = cmp.Or(h.Labels[label], "true")
	}
	h.AgentReady = !h.forsaken
	c.version[h.Name]++
}

// rollsOut replaces the pods of NVIDIA's device plugin.
func (c *run) rollsOut() {
	for _, h := range c.all() {
		at := slices.IndexFunc(h.Pods, playedBy(pluginLabel))
		if !h.off && at >= 0 {
			uid := h.Pods[at].UID
			c.deletePod(h, uid)
			if !h.stuck[uid] { // it may have been a pod of NVIDIA's MPS DaemonSet, which has the same label in its selector
				h.plugin.running = false
			}
			c.version[h.Name]++
		}
	}
}
