// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// What is decided by the age of an object: a GPUNode that is as young as its machine, and one that was made anew.

// briefEvent lets a machine come, with a policy of its own that is deleted within minutes. At times that policy fails
// before it has asked the agent for anything: Node Feature Discovery drops the operator's labels, or the pod of
// NVIDIA's device plugin does not end. The machine goes again.
func (c *run) briefEvent(random *rand.Rand) {
	c.serial++
	name := fmt.Sprint("brief-", c.serial)
	c.machine(name, random)
	h := c.hosts[name]
	h.pool = name
	h.Labels[history.PoolLabel] = name
	c.snapshot(h)
	p := policyOf(name, []v1alpha1.Sharing{mps(4), timeSlicing(4), mig(count("1g", 2))}[random.IntN(3)], func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector, p.Spec.Priority = &v1alpha1.NodeSelector{MatchLabels: map[string]string{history.PoolLabel: name}}, 9
	})
	p.UID, p.CreationTimestamp = types.UID(name), metav1.NewTime(c.Now)
	c.Policies = append(slices.Clone(c.Policies), p)
	c.allows(&p)
	denied := c.nfd.denies
	c.nfd.denies = random.IntN(2) == 0
	if c.Plugin.ClusterPolicy && random.IntN(3) == 0 {
		c.hangsOn(h, false)
	}
	c.tell("%s comes: %s, for minutes: %s; NFD drops the operator's labels: %v", name, h.hardwareSays(), history.Says(&p), c.nfd.denies)
	c.rest(time.Duration(1+random.IntN(7))*time.Minute, 120)
	c.Policies = slices.DeleteFunc(slices.Clone(c.Policies), func(o v1alpha1.GPUSharingPolicy) bool { return o.Name == name })
	c.tell("policy %s is deleted", name)
	if c.rest(3*time.Minute, 90); c.broken != "" {
		return
	}
	if problem := c.unrestored(h); problem != "" && h.waits() == "" && h.GPU.Spec.PolicyName == "" {
		c.breaks("restore", "%s after its policy was deleted node %s is not restored: %s; nothing says so", 3*time.Minute, name, problem)
	}
	c.nfd.denies = denied
	delete(c.hosts, name)
	delete(c.before, name)
	delete(c.theirs, name)
}

// calledAnew looks whether a GPUNode is called one that was made anew, or of a backup, which never was.
func (c *run) calledAnew(d rollout.Decision) {
	for _, n := range d.Nodes {
		if h := c.hosts[n.Node]; h != nil && h.made == 1 && !h.backedUp && strings.HasPrefix(n.Message, "The GPUNode was made anew") {
			c.breaks("truth", "the GPUNode of %s is as old as its machine: %s", n.Node, n.Message)
		}
	}
}

// kindsEvent deletes the operator's kinds with all their objects and installs them again. The GPUNodes come first, at
// times as a backup has them, and the policies minutes later: meanwhile each node stays as its policy had it.
func (c *run) kindsEvent(random *rand.Rand) {
	if len(c.Policies) == 0 || c.Plugin.Reason != "" {
		return
	}
	d, _ := c.rest(time.Hour, 200)
	if c.lapse(2 * timing.ClocksDiffer); c.broken != "" {
		return
	}
	asked, kept, backup := c.Policies, map[string]string{}, random.IntN(2) == 0
	for _, n := range d.Nodes {
		by := slices.IndexFunc(asked, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == n.Policy && p.Spec.GPUSelector == nil })
		if h := c.hosts[n.Node]; h != nil && by >= 0 && !h.off && h.AgentReady && !h.upgrade.goesOn() && n.State == node.UpToDate {
			kept[n.Node] = h.served()
		}
	}
	c.Policies = nil
	for _, h := range c.all() {
		was := h.GPU
		if c.makeGPUNode(h); backup {
			h.restoreGPUNode(was)
		}
		h.report()
	}
	c.tell("the operator's kinds are gone with all their objects, and are back; the GPUNodes of a backup: %v", backup)
	for range 6 * (1 + random.IntN(8)) {
		c.staysServed(kept)
		c.lapse(10 * time.Second)
	}
	c.createAgain(asked)
	for range 12 {
		c.staysServed(kept)
		c.lapse(10 * time.Second)
	}
}

// served is how a host serves its GPUs.
func (h *host) served() string {
	return fmt.Sprint(h.Labels[v1alpha1.LabelConfig], h.instances(), slices.Sorted(maps.Keys(h.daemons)), h.isKept())
}

// staysServed is a reconcile that leaves hosts as they are served.
func (c *run) staysServed(kept map[string]string) {
	c.step(true)
	for name, was := range kept {
		if h := c.hosts[name]; h != nil && h.served() != was {
			c.breaks("harmless", "node %s is served as %s, and was as %s, when the operator's kinds were gone for minutes", name, h.served(), was)
		}
	}
}

// clockEvent sets the clock of a machine wrong, by which its kubelet says since when a pod is Ready, and its agent since
// when something holds. It stays wrong.
func (c *run) clockEvent(random *rand.Rand) {
	h := c.some(random)
	h.skew = []time.Duration{-24 * time.Hour, -10 * time.Minute, 10 * time.Minute, 24 * time.Hour}[random.IntN(4)]
	c.tell("the clock of %s is ahead by %s", h.Name, h.skew)
}

// jumpEvent lets a controller lead whose clock is ahead, as that of a machine after a boot may be, while policies are
// edited, and then one whose clock is right: all that the first has stamped lies in the future.
func (c *run) jumpEvent(random *rand.Rand) {
	c.leadEvent(random)
	c.ahead = []time.Duration{10 * time.Minute, time.Hour, 13 * time.Hour, 400 * 24 * time.Hour}[random.IntN(4)]
	c.tell("the controller's clock is ahead by %s", c.ahead)
	for range 1 + random.IntN(2) {
		c.editEvent(random)
		c.reconciles(1 + random.IntN(30))
	}
	c.ahead = 0
	c.leadEvent(random)
	c.tell("the controller's clock is right")
}

// lateMonitorEvent lets a monitor come that no DaemonSet controls: another one would not come at once in its place. Its
// agent has reported it as a user before it is told of the claim, and may report nothing more for a while.
func (c *run) lateMonitorEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil || c.seed < onDriver {
		return
	}
	c.comesToMonitor(h, []string{"", "ReplicaSet", "StatefulSet"}[random.IntN(3)], random.IntN(2) == 0)
	c.resharesUnder(random)
	if was := h.lags; random.IntN(2) == 0 {
		h.lags = true
		c.reconciles(4 + random.IntN(12))
		h.lags = was
	}
}
