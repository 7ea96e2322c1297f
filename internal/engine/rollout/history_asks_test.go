// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// withdrawn looks whether the agent of a node that takes pods is still asked for what takes instances or GPUs from them,
// after so many reconciles and so long, in which a write that was refused is tried again. An agent that comes back would do it at once, and sees no init container. What was reached
// before it keeps up by itself.
func (c *run) withdrawn() {
	const reconciles, most = 12, 2 * time.Minute
	for _, h := range c.all() {
		spec, good := h.GPU.Spec, h.GPU.Status.Rollout.LastGood
		reached := good != nil && good.ConfigName == spec.ConfigName
		if h.asks++; c.seed%onDriver < history.Late || h.off || h.refuses || h.isKept() || reached || spec.MIGActuator != "" || h.required {
			h.asks, h.asksSince = 0, c.Now
			continue
		}
		steps, _ := plan.Node(spec.Devices, plan.Devices(h.GPU.Status.Devices))
		needsIdle := func(s plan.Step) bool { return s.Needs() > plan.NeedsNothing }
		switch {
		case !slices.ContainsFunc(steps, needsIdle) || plan.OnlyComputeMode(steps):
			h.asks, h.asksSince = 0, c.Now
		case h.asks > reconciles && c.Now.Sub(h.asksSince) > most:
			c.breaks("harmless", "node %s takes pods, and its agent is still asked: %s (%s)", h.Name, steps[0], c.states[h.Name])
		}
	}
}
