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
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// onego is for how long a node is kept from its users, by our taint or our stops, with breaks that are too short to be
// any.
type onego struct {
	since, until time.Time
	whole        time.Time // since when there was no break but upgrades of the driver
	maintained   time.Time // since when the driver is being upgraded
	looked       time.Time
	vain         time.Time // since when nothing is to be changed on it
	says         string    // and why not
}

// mostInOneGo is how long that may last: the drain, the stop, the agent's time with one reboot, the verification, and
// the same once more without a drain on the way back.
const mostInOneGo = 10*time.Minute + timing.RebootTimeout +
	2*(timing.StopTimeout+timing.ApplyTimeout+timing.VerifyTimeout)

// shortBreak is a break that is none: who is told that the node takes pods again could hardly start one.
const shortBreak = timing.Patience / 2

// isKept reports whether the operator keeps a node from its users.
func (h *host) isKept() bool {
	_, stopped := h.Annotations[v1alpha1.AnnotationStopped]
	return stopped || h.isTainted()
}

// isTainted reports whether it does so by a taint.
func (h *host) isTainted() bool {
	return !h.DevicesTaintedAt.IsZero() || len(withoutOurs(h.Taints)) < len(h.Taints)
}

// begin begins the time anew in which nodes may be kept from their users: something else happens.
func (c *run) begin() {
	for _, h := range c.all() {
		h.taken = onego{}
	}
}

// checkRelease looks whether a node is kept from its users for longer in one go than the deadlines of the stages allow,
// whatever blocks it. An upgrade of the driver keeps NVIDIA's operands off by itself, and has a deadline too.
func (c *run) checkRelease() {
	for _, h := range c.all() {
		t, kept := &h.taken, h.isKept()
		if t.whole.IsZero() { // it has just joined
			*t = onego{whole: c.Now, maintained: c.Now, looked: c.Now}
		}
		if !h.upgrade.goesOn() {
			t.maintained = c.Now
		} else if kept = h.isTainted(); kept && c.Now.Sub(t.maintained) > timing.MaintenanceTimeout+timing.StopTimeout {
			c.breaks("bounded", "node %s is tainted for %s under maintenance (%s)", h.Name, c.Now.Sub(t.maintained), c.states[h.Name])
		}
		switch {
		case h.off || h.upgrade.goesOn() || c.Now.Sub(t.until) > shortBreak:
			t.since, t.until = c.Now, c.Now
		case kept:
			t.until = c.Now
		}
		switch {
		case h.off || !kept:
			t.whole = c.Now
		case h.upgrade.goesOn(): // one upgrade after the other is not the operator's (2^40+970134)
			t.whole = t.whole.Add(c.Now.Sub(t.looked))
		}
		t.looked = c.Now
		most := mostInOneGo + time.Minute // in these histories time passes in steps of up to a minute
		lasts := max(t.until.Sub(t.since), c.Now.Sub(t.whole))
		if r := h.GPU.Spec.Release; r != nil && lasts > most {
			goesBack := strings.HasPrefix(c.states[h.Name], string(node.Failed)) // which is finished after a window too (2^40+782682)
			if by, _, _ := c.Desired(h); by == nil || goesBack {
				most += node.DrainTimeout(r.Drain) - 10*time.Minute // as the last policy said
			}
		}
		if lasts > most {
			c.breaks("bounded", "node %s is kept from its users for %s in one go (%s)", h.Name, lasts, c.states[h.Name])
		}
	}
}

// hangEvent lets a pod of NVIDIA's hang on a node: it is told to end and does not, or its deletion is refused.
// Meanwhile something else is asked of the node, nothing any more, or what was asked before. The pod may stay until the
// faults end.
func (c *run) hangEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || !c.Plugin.ClusterPolicy {
		return
	}
	c.hangsOn(h, random.IntN(2) == 0)
	asked := c.Policies
	switch what := random.IntN(3); {
	case what == 0:
		c.Policies = nil
		c.tell("every policy is deleted")
	case what == 1 && len(c.Policies) > 0:
		history.Edit(c, random)
	}
	c.rest([]time.Duration{20 * time.Minute, 3 * time.Hour, 6 * time.Hour}[random.IntN(3)], 300)
	if c.Policies == nil {
		c.createAgain(asked)
	}
	if random.IntN(2) == 0 {
		c.hangsNoMore(h)
		c.tell("what hangs on %s ends", h.Name)
	}
}

// createAgain creates policies that were deleted.
func (c *run) createAgain(asked []v1alpha1.GPUSharingPolicy) {
	if len(asked) == 0 {
		return
	}
	for i := range asked {
		asked[i] = *asked[i].DeepCopy()
		asked[i].Status = v1alpha1.GPUSharingPolicyStatus{}
	}
	c.ReplacePolicies(asked)
	c.CountAnew()
	c.tell("the policies are created again: %s", history.Says(&c.Policies[0]))
}

// hangsOn lets a test workload of NVIDIA's validator stay on a host, or the pod of the device plugin that is there.
func (c *run) hangsOn(h *host, validator bool) {
	if h.stuck == nil {
		h.stuck = map[string]bool{}
	}
	at := slices.IndexFunc(h.Pods, playedBy(pluginLabel)) // a pod of a user may select that label too (2^40+808648)
	if !validator && at >= 0 {
		h.stuck[h.Pods[at].UID] = true
		c.tell("pod %s of %s will not end when it is told to", h.Pods[at].Name, h.Name)
		return
	}
	c.serial++
	name := fmt.Sprint("nvidia-cuda-validator-", c.serial)
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "gpu-operator", Name: name, UID: name, Controller: "ClusterPolicy", Validator: true, Scheduled: c.Now,
	})
	h.stuck[name], c.hangs[name] = true, true
	c.tell("pod %s of %s hangs, and its deletion is refused", name, h.Name)
}

// hangsNoMore ends the pods of NVIDIA's that hang on a host and were told to end.
func (c *run) hangsNoMore(h *host) {
	hung := h.stuck
	h.stuck = nil
	for _, p := range slices.Clone(h.Pods) {
		if hung[p.UID] && (p.Validator || p.Terminating) {
			c.deletePod(h, p.UID)
		}
	}
}
