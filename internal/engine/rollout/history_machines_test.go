// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

func (c *run) dieEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off {
		return
	}
	c.dies(h)
	h.lost = random.IntN(3) == 0
	c.tell("machine %s dies, for good: %v", h.Name, h.lost)
}

// returnEvent boots the machines that are off, with the GPUs that they had, fewer, or others.
func (c *run) returnEvent(random *rand.Rand) {
	for _, h := range c.all() {
		if h.off {
			c.bootsWith(h, random)
		}
	}
}

// rebootEvent boots a machine that runs.
func (c *run) rebootEvent(random *rand.Rand) {
	h := c.some(random)
	if !h.off {
		c.dies(h)
		c.bootsWith(h, random)
	}
}

func (c *run) bootsWith(h *host, random *rand.Rand) {
	c.serial++
	what := "as it was"
	count := len(h.devices())
	switch index := random.IntN(count); random.IntN(4) {
	case 0:
		if count > 1 {
			what = fmt.Sprintf("without GPU %d", index)
			h.swap(index, "", c.serial)
		}
	case 1:
		what = fmt.Sprintf("with another GPU %d", index)
		var model sim.Model
		h.hardware.Update(func(n *sim.Node) { model = n.GPUs[index].Model })
		h.swap(index, model, c.serial)
	}
	c.returns(h)
	c.tell("machine %s boots %s", h.Name, what)
}

func (c *run) sickEvent(random *rand.Rand) {
	h := c.some(random)
	if devices := h.devices(); !h.off && len(devices) > 0 {
		d := devices[random.IntN(len(devices))]
		c.fallsIll(h, d.UUID)
		c.tell("GPU %d of %s is marked unhealthy by NVIDIA's device plugin", d.Index, h.Name)
	}
}

// lostEvent takes a GPU off the bus of a machine that runs.
func (c *run) lostEvent(random *rand.Rand) {
	h := c.some(random)
	devices := h.devices()
	if h.off || len(devices) < 2 {
		return
	}
	index := random.IntN(len(devices))
	for _, holder := range devices[index].Holders {
		c.end(h, holder.Pod)
	}
	for _, p := range h.userPods() {
		if c.heldGPUs[p.Name].uuid == devices[index].UUID {
			c.end(h, p.Name)
		}
	}
	h.swap(index, "", 0)
	h.plugin.running = false
	h.report()
	h.reborn()
	if by, _, _ := c.desired(h); c.seed%onDriver >= history.Late && by != nil && by.Spec.Rollout.Paused && h.lastPolicy != by.Name {
		h.countsAnew() // indexes are those that the GPUs have when the policy is first applied
	}
	c.tell("GPU %d of %s falls off the bus", index, h.Name)
}

func (c *run) joinEvent(random *rand.Rand) {
	if len(c.hosts) >= 4 {
		return
	}
	c.serial++
	name := fmt.Sprintf("j%d", c.serial)
	c.machine(name, random)
	c.snapshot(c.hosts[name])
	c.tell("node %s joins: %s", name, c.hosts[name].hardwareSays())
}

func (h *host) hardwareSays() string {
	var parts []string
	for _, d := range h.devices() {
		parts = append(parts, fmt.Sprintf("%s MIG %v %v", gpu.ProductLabel(d.Product), d.State.MIG, bornAs(d).instances))
	}
	return strings.Join(parts, ", ")
}

// replaceNodeEvent deletes a Node with all that is on it, and registers another of that name.
func (c *run) replaceNodeEvent(random *rand.Rand) {
	h := c.some(random)
	version := c.version[h.Name]
	for _, p := range h.userPods() {
		delete(c.heldGPUs, p.Name)
	}
	c.machine(h.Name, random)
	c.version[h.Name] = version + 1
	delete(c.cache.nodes, h.Name)
	delete(c.theirs, h.Name)
	delete(c.retained, h.Name)
	c.snapshot(c.hosts[h.Name])
	c.tell("node %s is replaced: %s", h.Name, c.hosts[h.Name].hardwareSays())
}
