// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
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
	rests, vain  time.Time // since when nothing is to be changed on it; the later of that and what may hold it all the same
	looks        bool      // what offers the GPUs may hold it
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

// lateDriverEvent lets the pod of NVIDIA's DRA driver on a node stay when it is told to end, which its process cannot while
// a call to a GPU hangs. No other comes meanwhile. Something else is asked of the node, nothing any more, or what was asked before.
func (c *run) lateDriverEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil || c.seed < onDriver || !h.driverRuns() {
		return
	}
	if h.stuck == nil {
		h.stuck = map[string]bool{}
	}
	h.stuck[h.driver.uid] = true
	c.tell("the driver's pod %s of %s will not end when it is told to", h.driver.uid, h.Name)
	asked := c.Policies
	switch random.IntN(3) {
	case 0:
		c.Policies = nil
		c.tell("every policy is deleted")
	case 1:
		c.reshareEvent(random)
	}
	if c.rest(time.Hour, 150); c.Policies == nil {
		c.createAgain(asked)
		c.rest(time.Hour, 150)
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

// What others take for long or again and again: the only slot of each maintenance window, the agent, the driver. And
// what is left behind on a node that moves between NVIDIA's programs.

// lasts lets a time pass, in which the controller wakes up as it does, so many times at most if it may come to rest.
func (c *run) lasts(d time.Duration, most int) {
	end := c.Now.Add(d)
	_, rests := c.rest(d, most)
	if remaining := end.Sub(c.Now); remaining > 0 && c.broken == "" && rests {
		c.lapse(remaining)
	} else if remaining > 0 {
		c.passes(remaining) // its deadlines wake a controller that has not come to rest (2^40+940014)
	}
}

// windowsEvent has a policy partition GPUs one node after another, in a window each night that ends a drain which is
// not done. Some pods run for weeks, and an agent may be lost from the middle of a window to the next. After as many
// windows as there are nodes, and one more, each node had its turn.
func (c *run) windowsEvent(random *rand.Rand) {
	by, _, _ := c.Desired(c.some(random))
	if by == nil || len(c.hosts) < 2 || c.Plugin.Reason != "" {
		return
	}
	for _, h := range c.all() {
		for range random.IntN(2) {
			c.Start(h, "replica", random)
		}
	}
	p := &c.Policies[slices.IndexFunc(c.Policies, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == by.Name })]
	name, was := p.Name, p.Spec.Rollout
	p.Generation++
	p.Spec.GPUSelector, p.Spec.Sharing = nil, mig(count("1g", int32(1+random.IntN(3))))
	p.Spec.Rollout = nightly(was, random)
	c.CountAnew()
	c.allows(p)
	c.tell("policy %s has a window each night: %s", name, history.Says(p))
	waited, windows := map[string]int{}, len(c.hosts)+1
	var lost *host
	for range windows {
		opens := c.Now.UTC().Truncate(24 * time.Hour).Add(22 * time.Hour)
		if !opens.After(c.Now) {
			opens = opens.Add(24 * time.Hour)
		}
		if c.lasts(opens.Sub(c.Now), 120); c.broken != "" {
			return
		}
		c.finds(lost)
		c.turns = map[string]bool{}
		d, l := c.night(random)
		lost = l
		for _, n := range d.Nodes {
			if waits := n.Reason == v1alpha1.ReasonWaitingForBudget || n.Reason == v1alpha1.ReasonWaitingForFirst; waits && !c.turns[n.Node] {
				waited[n.Node]++
			}
			if waited[n.Node] == windows {
				c.breaks("progress", "in none of %d windows came the turn of node %s: %s", windows, n.Node, n.Message)
			}
		}
		c.turns = nil
	}
	c.finds(lost)
	at := slices.IndexFunc(c.Policies, func(o v1alpha1.GPUSharingPolicy) bool { return o.Name == name })
	c.Policies[at].Generation++
	c.Policies[at].Spec.Rollout = was
	c.tell("policy %s has no window any more", name)
}

// nightly is a rollout in windows of an hour each night.
func nightly(was v1alpha1.Rollout, random *rand.Rand) v1alpha1.Rollout {
	r := v1alpha1.Rollout{
		MaxUnavailable: new(intstr.FromInt32(1)), FailureThreshold: 10, Reboot: was.Reboot, StartupTaint: was.StartupTaint,
		Drain:       v1alpha1.Drain{Mode: v1alpha1.DrainModeWaitForIdle, TimeoutSeconds: 86400},
		Windows:     []v1alpha1.MaintenanceWindow{window("0 22 * * *", "1h")},
		OnWindowEnd: v1alpha1.WindowEndCancelDrain,
	}
	if random.IntN(2) == 0 {
		r.MaxUnavailable = new(intstr.FromString("100%"))
	}
	return r
}

// night is a window, with the last decision before it closes, and the host that has lost its agent; nil: none has.
func (c *run) night(random *rand.Rand) (d rollout.Decision, lost *host) {
	for n := range 48 {
		d = c.step(true)
		if h := c.some(random); n == 24 && h.isKept() && h.AgentReady && random.IntN(2) == 0 {
			lost, h.AgentReady = h, false
			c.tell("the agent of %s is lost", h.Name)
		}
		if c.lapse(time.Second); n%6 == 5 && n < 47 {
			c.passes(8 * time.Minute) // a deadline of the controller's wakes it in that time (2^40+710620)
		}
	}
	return d, lost
}

// finds brings the agent of a host back that was lost.
func (c *run) finds(lost *host) {
	if lost != nil {
		lost.AgentReady = !lost.off && lost.down.IsZero() && !lost.upgrade.leaves
		c.tell("the agent of %s is back: %v", lost.Name, lost.AgentReady)
	}
}

// flapsEvent lets the agent of a node go again and again, for longer than a change keeps its slot, and come back for a
// few minutes.
func (c *run) flapsEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || !h.AgentReady || h.forsaken || h.upgrade.goesOn() || !h.down.IsZero() {
		return
	}
	history.Edit(c, random)
	c.tell("the agent of %s comes and goes", h.Name)
	for range 4 {
		c.reconciles(random.IntN(6))
		h.AgentReady = false
		if c.lasts(time.Duration(31+random.IntN(5))*time.Minute, 200); c.broken != "" {
			break
		}
		h.AgentReady = !h.off && h.down.IsZero() && !h.upgrade.leaves
	}
	c.tell("the agent of %s stays", h.Name)
}

// upgradesEvent upgrades NVIDIA's driver on a node, which takes hours or is done again and again, while a policy is
// edited. Its agent may report nothing meanwhile.
func (c *run) upgradesEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || h.upgrade.goesOn() || !h.down.IsZero() || !c.Plugin.ClusterPolicy {
		return
	}
	history.Edit(c, random)
	c.reconciles(random.IntN(12))
	builds := []time.Duration{4 * time.Hour, 25 * time.Minute, 5 * time.Minute}[random.IntN(3)]
	restart, lagged := random.IntN(2) == 0, h.lags
	h.lags = lagged || random.IntN(2) == 0
	defer func() { h.lags = lagged }()
	for end := c.Now.Add(4 * time.Hour); c.Now.Before(end) && c.broken == "" && !h.off; {
		if !h.upgrade.goesOn() {
			c.upgrades(h, upgrade{restart: restart, builds: builds})
		}
		for range 4 {
			c.unhindered(c.step(true))
			c.lapse(20 * time.Second)
		}
	}
}

// retainedEvent gives all policies the same releasePolicy, moves a node to the other one of NVIDIA's programs, and
// deletes the policies before or after that. The node may move back, and the policies return.
func (c *run) retainedEvent(random *rand.Rand) {
	if c.seed < onDriver || len(c.Policies) == 0 {
		return
	}
	h := c.some(random)
	release := []v1alpha1.ReleasePolicy{v1alpha1.ReleasePolicyRestore, v1alpha1.ReleasePolicyRetain}[random.IntN(2)]
	c.Policies = slices.Clone(c.Policies)
	for i := range c.Policies {
		c.Policies[i].Generation++
		c.Policies[i].Spec.ReleasePolicy = release
	}
	c.retains = c.retains || release == v1alpha1.ReleasePolicyRetain
	c.tell("every policy has releasePolicy %s", release)
	c.rest(10*time.Minute, 60)
	asked, first := c.Policies, random.IntN(2) == 0
	for _, deletes := range []bool{first, !first} {
		if deletes {
			c.Policies = nil
			c.tell("every policy is deleted")
		} else {
			c.switches(h, random)
		}
		c.rest(20*time.Minute, 100)
	}
	if random.IntN(2) == 0 && c.broken == "" {
		c.switches(h, random)
		c.rest(20*time.Minute, 100)
	}
	for i := range asked {
		asked[i].Spec.ReleasePolicy = v1alpha1.ReleasePolicyRestore
	}
	c.createAgain(asked)
}
