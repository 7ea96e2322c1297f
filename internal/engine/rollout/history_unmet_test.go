// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// unmetEvent has a policy change the layout of a node's GPUs, and in the middle of that the node become one on which it
// cannot be honoured: it asks for more instances than a GPU has, or another controller offers the GPUs. The agent may
// report nothing meanwhile. As nothing is changed there then, the node is its users' again once the agent can no longer
// be at work. In the end the policy can be honoured again.
func (c *run) unmetEvent(random *rand.Rand) {
	h := c.some(random)
	by, _, err := c.Desired(h)
	if h.off || !h.AgentReady || err != nil || by == nil || h.driver.serves || c.shared(h) || h.upgrade.goesOn() || !h.down.IsZero() || c.Plugin.Reason != "" {
		return
	}
	asks := func(n int32) {
		c.edits(by.Name, func(p *v1alpha1.GPUSharingPolicy) { p.Spec.GPUSelector, p.Spec.Sharing = nil, mig(count("1g", n)) })
		c.CountAnew()
	}
	asks(int32(1 + random.IntN(3)))
	began := c.Now
	stage := []func() bool{
		h.isTainted,
		func() bool { return h.Annotations[v1alpha1.AnnotationStopped] != "" },
		func() bool { return h.GPU.Spec.ChangeTime.After(began) },
	}[random.IntN(3)]
	for n := 0; n < 40 && !stage() && c.broken == ""; n++ {
		c.step(true)
		c.lapse(time.Second)
	}
	lagged := h.lags
	h.lags = lagged || random.IntN(2) == 0
	slicer := random.IntN(3) == 0
	if slicer {
		h.OtherPartitioner = "mig.das.com/1g.5gb"
	} else {
		asks(8)
	}
	c.tell("the policy cannot be honoured on %s; a slicer has come: %v, the agent lags: %v", h.Name, slicer, h.lags)
	c.passes(timing.ApplyTimeout + time.Minute)
	unmet := strings.HasPrefix(c.states[h.Name], string(node.Unsupported)) && h.GPU.Spec.Reboot == nil && !h.upgrade.goesOn()
	if unmet && h.isKept() {
		c.breaks("bounded", "node %s is kept from its users, and nothing is to be changed there: %s", h.Name, c.states[h.Name])
	}
	if h.lags = lagged; slicer {
		h.OtherPartitioner = ""
	} else {
		asks(1)
	}
}

// virtualEvent has a policy partition the GPUs of a virtual machine, which takes a reboot, and deletes it when the
// operator may not reboot the machine any more: only a person can then bring it back.
func (c *run) virtualEvent(random *rand.Rand) {
	at := slices.IndexFunc(c.all(), func(h *host) bool {
		return h.hardwareNoReset() && !h.off && h.AgentReady && h.down.IsZero() && !h.upgrade.goesOn() && !h.driver.serves && !c.shared(h)
	})
	if at < 0 || c.Plugin.Reason != "" {
		return
	}
	h := c.all()[at]
	by, _, err := c.Desired(h)
	if by == nil || err != nil {
		return
	}
	h.canReboot = true
	h.report()
	c.edits(by.Name, func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.GPUSelector, p.Spec.Sharing = nil, mig(count("1g", int32(1+random.IntN(3))))
		p.Spec.Rollout.Reboot, p.Spec.Rollout.Paused, p.Spec.Rollout.Drain.Mode = v1alpha1.RebootModeIfRequired, false, v1alpha1.DrainModeEvict
	})
	c.CountAnew()
	c.rest(2*time.Hour, 300)
	c.edits(by.Name, func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Reboot = v1alpha1.RebootModeNever })
	c.rest(10*time.Minute, 60)
	asked := c.Policies
	c.Policies = nil
	c.tell("every policy is deleted, and %s may not be rebooted", h.Name)
	c.rest(2*time.Hour, 300)
	c.createAgain(asked)
}

// heldInVain looks whether a node is kept from its users though nothing is to be changed there, and its agent can be at
// work on nothing that was asked of it before; or though an upgrade of the driver waits for NVIDIA's programs.
func (c *run) heldInVain(d rollout.Decision) {
	for _, n := range d.Nodes {
		h := c.hosts[n.Node]
		if h == nil {
			continue
		}
		most := timing.StopTimeout
		if h.withoutGPUNode {
			most = timing.ApplyTimeout // nobody knows what its agent is at work on
		}
		ours := h.isTainted() || h.isKept() && !h.stoppedForUpgrade() // what k8s-driver-manager has stopped too waits for that
		if waits := c.Now.Sub(h.upgrade.began); h.Labels[upgradeLabel] == "validation-required" && ours && !h.off && len(c.fights) == 0 && waits > most+2*time.Minute {
			c.breaks("bounded", "node %s is kept from its users for %s, and an upgrade of the driver waits for that: %s", n.Node, waits, n.Message)
		}
		rests := slices.Contains([]node.State{node.Unsupported, node.UpToDate, node.Degraded}, n.State) ||
			n.State == node.Failed && strings.Count(n.Message, "goes back to its last good state") == strings.Count(n.Message, "goes back to its last good state (Failed")
		within := timing.ApplyTimeout
		if h.GPU.Spec.Reboot != nil {
			within = timing.RebootTimeout
		}
		works := n.State == node.Unsupported && len(h.GPU.Spec.Devices) > 0 && c.Now.Before(h.GPU.Spec.ChangeTime.Add(within))
		hindered := h.refuses || h.withoutGPUNode || len(c.fights) > 0 || h.upgrade.goesOn()
		switch t := &h.taken; {
		case !rests || works || hindered || h.off || !h.AgentReady || !h.isKept():
			t.vain, t.looks = time.Time{}, false
		case t.vain.IsZero():
			t.vain, t.says = c.Now, fmt.Sprintf("%s (%s): %s", n.State, n.Reason, n.Message)
			switch {
			case n.State == node.Degraded: // what offers the GPUs is verified
				t.vain = c.Now.Add(timing.VerifyTimeout)
			case n.Reason == v1alpha1.ReasonOperandsNotEnding: // on the way back
				t.vain = c.Now.Add(timing.StopTimeout)
			}
			t.rests = c.Now
		case h.unsettled() && c.Now.Sub(t.rests) < timing.StopTimeout && t.vain.Before(c.Now): // node.LooksFirst, which sleeps until then (968012)
			t.vain, t.looks = t.rests.Add(timing.StopTimeout), true
		case t.looks && !h.unsettled() && t.vain.After(c.Now):
			t.vain, t.looks = c.Now, false
		}
	}
}

// unsettled reports whether pods of the program that offers the GPUs are on their way, or do not end.
func (h *host) unsettled() bool {
	hangs := func(p cluster.Pod) bool { return p.Terminating && p.KeptBy(cluster.DeployLabels()[0]) }
	return h.driver.serves && !h.driverRuns() || slices.ContainsFunc(h.Pods, hangs)
}

// givesBack looks whether such a node was given back in time.
func (c *run) givesBack() {
	for _, h := range c.all() {
		if lasts := c.Now.Sub(h.taken.vain); !h.taken.vain.IsZero() && h.isKept() && lasts > 2*time.Minute {
			c.breaks("bounded", "node %s is kept from its users for %s, and nothing is to be changed there: %s", h.Name, lasts, h.taken.says)
		}
	}
}

// passes lets just this time pass, in which the controller wakes up as it does.
func (c *run) passes(d time.Duration) {
	end := c.Now.Add(d)
	for idle := 0; c.Now.Before(end) && c.broken == ""; idle++ {
		d, left := c.step(true), end.Sub(c.Now)
		if len(d.Actions) > 0 {
			idle = 0
		}
		if step := time.Second; idle < 3 {
			c.lapse(min(step, left))
		} else {
			c.lapse(min(c.waitsFor(d, left), left))
		}
	}
}
