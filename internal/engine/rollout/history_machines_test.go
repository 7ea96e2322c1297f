// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

func (c *run) sickEvent(random *rand.Rand) {
	h := c.some(random)
	if devices := h.devices(); !h.off && len(devices) > 0 {
		d := devices[random.IntN(len(devices))]
		c.fallsIll(h, d.UUID)
		c.tell("GPU %d of %s is marked unhealthy by NVIDIA's device plugin", d.Index, h.Name)
	}
}

func (c *run) LoseGPU(h *host, index int) {
	d := h.devices()[index]
	for _, holder := range d.Holders {
		c.end(h, holder.Pod)
	}
	for _, p := range h.userPods() {
		if c.heldGPUs[p.Name].uuid == d.UUID {
			c.end(h, p.Name)
		}
	}
	c.SwapGPU(h, index, "", 0)
	h.plugin.running = false
	h.report()
	h.reborn()
}

func (c *run) SwapGPU(h *host, index int, model sim.Model, serial int) {
	by, _, _ := c.Desired(h) // without that GPU it may be another
	h.swap(index, model, serial)
	if c.seed%onDriver >= history.Late && by != nil && (by.Spec.Rollout.Paused && h.lastPolicy != by.Name || h.isUnresolved(by)) {
		h.countsAnew() // indexes are those that the GPUs have when the policy is first applied
	}
}

// isUnresolved reports whether a policy names other indexes than were resolved on a host: they are resolved once its first
// change there begins, by the GPUs that are there then (817896, 915290, 2^40+804231, 2^40+961622).
func (h *host) isUnresolved(by *v1alpha1.GPUSharingPolicy) bool {
	spec, want := h.copied().GPU.Spec, by.Spec.GPUSelector
	was := spec.Numbering
	return want != nil && len(want.Indexes) > 0 && (was == nil || spec.PolicyName != by.Name || !slices.Equal(was.Indexes, want.Indexes))
}

func (c *run) Join(name string, random *rand.Rand) {
	c.machine(name, random)
	c.snapshot(c.hosts[name])
	c.tell("node %s: %s", name, c.hosts[name].hardwareSays())
}

func (h *host) hardwareSays() string {
	var parts []string
	for _, d := range h.devices() {
		parts = append(parts, fmt.Sprintf("%s MIG %v %v", gpu.ProductLabel(d.Product), d.State.MIG, bornAs(d).instances))
	}
	return strings.Join(parts, ", ")
}

func (c *run) ReplaceNode(h *host, random *rand.Rand) {
	version := c.version[h.Name]
	for _, p := range h.userPods() {
		delete(c.heldGPUs, p.Name)
	}
	c.Join(h.Name, random)
	c.version[h.Name] = version + 1
	delete(c.cache.nodes, h.Name)
	delete(c.theirs, h.Name)
	delete(c.retained, h.Name)
}

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
	c.DeletePolicy(name)
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

// calledAnew looks whether a GPUNode is called one that was made anew, or of a backup, which never was. One that a clock
// which was ahead has stamped is told from those by what was reported of it, a second later.
func (c *run) calledAnew(d rollout.Decision) {
	for _, n := range d.Nodes {
		if h := c.hosts[n.Node]; h != nil && h.made == 1 && !h.backedUp && h.GPU.Spec.ChangeTime.Unix() != 0 && !h.GPU.Spec.ChangeTime.After(c.Now) && strings.HasPrefix(n.Message, "The GPUNode was made anew") {
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
	if c.passes(2 * timing.ClocksDiffer); c.broken != "" { // its deadlines wake the controller (2^40+1037282)
		return
	}
	asked, kept, backup := c.Policies, map[string]string{}, random.IntN(2) == 0
	for _, n := range d.Nodes {
		by := slices.IndexFunc(asked, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == n.Policy && p.Spec.GPUSelector == nil })
		if h := c.hosts[n.Node]; h != nil && by >= 0 && !h.off && h.AgentReady && !h.upgrade.goesOn() && n.State == node.UpToDate && strings.HasPrefix(c.states[n.Node], string(n.State)) {
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
	c.ahead = []time.Duration{10 * time.Minute, time.Hour, 13 * time.Hour, 400 * 24 * time.Hour}[random.IntN(4)]
	history.LeadAnew(c, random)
	c.tell("the controller's clock is ahead by %s", c.ahead)
	for range 1 + random.IntN(2) {
		history.Edit(c, random)
		c.reconciles(1 + random.IntN(30))
	}
	c.ahead = 0
	history.LeadAnew(c, random)
	c.tell("the controller's clock is right")
}

// awayEvent has no controller lead for longer than a deadline, as through an upgrade of the control plane, in the middle
// of what an edit begins. Agents, NVIDIA's programs and pods go on. Nothing fails by a deadline that passed meanwhile.
func (c *run) awayEvent(random *rand.Rand) {
	history.Edit(c, random)
	c.reconciles(random.IntN(12))
	away := history.Pick(random, 6*time.Minute, 11*time.Minute, 20*time.Minute, 50*time.Minute)
	c.tell("no controller leads for %s", away)
	for range 20 {
		c.tick(away / 20)
		c.harmless()
	}
	history.LeadAnew(c, random)
	c.begin()
	failed := map[string]*v1alpha1.FailedChange{}
	for _, h := range c.all() {
		failed[h.Name] = h.GPU.Status.Rollout.Failed
	}
	for began := c.Now; c.broken == "" && c.Now.Sub(began) < timing.Grace-10*time.Second; c.reconciles(1) {
		for _, h := range c.all() {
			f := h.GPU.Status.Rollout.Failed
			overdue := []string{v1alpha1.ReasonNotAdvertised, v1alpha1.ReasonNotPublished, v1alpha1.ReasonApplyTimedOut, v1alpha1.ReasonDrainTimedOut, v1alpha1.ReasonOperandsNotEnding}
			if f != nil && !reflect.DeepEqual(f, failed[h.Name]) && slices.Contains(overdue, f.Reason) {
				c.breaks("harmless", "the change of %s failed by a deadline that passed while no controller led: %s", h.Name, f.Message)
			}
		}
	}
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

// What goes and comes back again and again, without anybody who undoes what the operator writes.

// nightsEvent stops a virtual machine each night, and starts it on another host: its Node stays, and all its GPUs are
// others.
func (c *run) nightsEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || h.upgrade.goesOn() || len(h.devices()) == 0 || c.nights {
		return
	}
	was := len(h.devices())
	c.nights = true
	c.tell("%s is stopped each night, and starts with 32 other GPUs, and in the end with %d", h.Name, was)
	for _, count := range []int{32, 32, was} {
		c.dies(h)
		c.step(true)
		c.serial++
		h.getsOther(count, c.serial)
		c.returns(h)
		if c.rest(5*time.Minute, 20); c.broken != "" {
			return
		}
	}
}

// getsOther gives a machine so many other GPUs of the same model.
func (h *host) getsOther(count, serial int) {
	h.hardware.Update(func(n *sim.Node) {
		models := slices.Repeat([]sim.Model{n.GPUs[0].Model}, count)
		other, err := sim.NewNode(fmt.Sprintf("host-%d-of-%s", serial, h.Name), models...)
		if err != nil {
			panic(err)
		}
		for i := range other.GPUs {
			other.GPUs[i].NoReset = n.GPUs[0].NoReset
		}
		n.GPUs = other.GPUs
	})
	h.remember()
}

// poolsEvent scales three pools to zero and back, with a policy each: a node comes to one after the other, and goes.
func (c *run) poolsEvent(random *rand.Rand) {
	const pools = 3
	others := c.Policies
	for i := range pools {
		name := fmt.Sprint("pool-", i)
		p := policyOf(name, timeSlicing(int32(2+i)), func(p *v1alpha1.GPUSharingPolicy) {
			p.Spec.NodeSelector, p.Spec.Priority = &v1alpha1.NodeSelector{MatchLabels: map[string]string{history.PoolLabel: name}}, 9
		})
		c.adds(p)
	}
	c.tell("%d pools of a policy each scale to zero and back", pools)
	for n := range 10 {
		c.serial++
		if c.joins(fmt.Sprintf("s%d", c.serial), fmt.Sprint("pool-", n%pools), random); c.broken != "" {
			return
		}
	}
	c.Policies = slices.DeleteFunc(slices.Clone(c.Policies), func(p v1alpha1.GPUSharingPolicy) bool {
		return !slices.ContainsFunc(others, func(o v1alpha1.GPUSharingPolicy) bool { return o.Name == p.Name })
	})
}

// joins lets a machine come to a pool, and go again after 35 s.
func (c *run) joins(name, pool string, random *rand.Rand) {
	c.machine(name, random)
	h := c.hosts[name]
	h.pool = pool
	h.Labels[history.PoolLabel] = h.pool
	c.snapshot(h)
	var d rollout.Decision
	for range 7 {
		d = c.step(true)
		c.lapse(5 * time.Second)
	}
	c.unhindered(d)
	delete(c.hosts, name)
	delete(c.before, name)
	delete(c.theirs, name)
}

// scalesEvent scales a pool with a policy of its own to zero and back again and again: its machine has the same name
// each time, as in a scale set, or another one. At times there is no other policy.
func (c *run) scalesEvent(random *rand.Rand) {
	const pool = "scales"
	others, alone, same := c.Policies, random.IntN(2) == 0, random.IntN(2) == 0
	if alone {
		c.Policies = nil
		c.rest(30*time.Minute, 200)
	}
	p := policyOf(pool, timeSlicing(4), func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector, p.Spec.Priority = &v1alpha1.NodeSelector{MatchLabels: map[string]string{history.PoolLabel: pool}}, 9
	})
	c.adds(p)
	c.tell("a pool scales to zero and back, its policy is the only one: %v, its machine has the same name: %v", alone, same)
	for range 12 {
		name := pool
		if c.serial++; !same {
			name = fmt.Sprint(pool, "-", c.serial)
		}
		if c.joins(name, pool, random); c.broken != "" {
			return
		}
		c.rest(time.Minute, 10)
	}
	c.DeletePolicy(pool)
	if alone {
		c.createAgain(others)
	}
}

// jobsEvent edits a policy, which drains no more, while short jobs follow one another on a node: the next one is bound
// as soon as the last has ended, and the agent reports it 2 s later.
func (c *run) jobsEvent(random *rand.Rand) {
	h := c.some(random)
	by, _, err := c.Desired(h)
	if h.off || err != nil || by == nil || h.driver.serves || c.shared(h) || h.upgrade.goesOn() || !h.down.IsZero() || !h.AgentReady {
		return
	}
	p := &c.Policies[slices.IndexFunc(c.Policies, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == by.Name })]
	p.Generation++
	p.Spec.Rollout.Drain.Mode = v1alpha1.DrainModeNever
	c.tell("short jobs follow one another on %s, and policy %s is edited: %s", h.Name, p.Name, history.Says(p))
	for n := range 11 {
		if n == 1 {
			p.Generation++
			p.Spec.GPUSelector, p.Spec.Sharing = nil, mig(count("1g", int32(1+random.IntN(3))))
			c.CountAnew()
		}
		c.runs(h)
		if c.broken != "" {
			return
		}
	}
}

// runs is a job of a queue, if the scheduler may bind it.
func (c *run) runs(h *host) {
	devices := h.devices()
	if len(devices) == 0 || slices.ContainsFunc(h.Taints, func(t corev1.Taint) bool { return t.Effect == corev1.TaintEffectNoSchedule }) {
		c.step(true)
		c.lapse(20 * time.Second)
		return
	}
	c.serial++
	name := fmt.Sprint("job-", c.serial)
	pod := cluster.Pod{Namespace: "user", Name: name, UID: "uid-" + name, Controller: "Job", GPU: true, Scheduled: c.Now}
	h.Pods = append(h.Pods, pod)
	c.kinds[name] = "job"
	c.unhindered(c.step(true))
	c.lapse(2 * time.Second)
	d, instance, uuid := h.devices()[0], gpu.WholeGPU, ""
	if d.State.MIG {
		if len(d.State.Instances) == 0 {
			c.end(h, name)
			return
		}
		instance, uuid = d.State.Instances[0].ID, d.State.Instances[0].UUID
	}
	h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.Name == name })
	c.hold(h, name, 0, instance)
	h.Pods[len(h.Pods)-1] = pod
	c.heldGPUs[name] = heldGPU{node: h.Name, uuid: d.UUID, instance: uuid, mig: d.State.MIG, boot: h.bootID()}
	for range 2 {
		c.unhindered(c.step(true))
		c.lapse(10 * time.Second)
	}
	c.leaves(h, pod)
}

// unhindered looks whether a node waits for the operator's own writes though nobody undoes them.
func (c *run) unhindered(d rollout.Decision) {
	isWritten := slices.ContainsFunc(d.Actions, func(a action.Action) bool {
		_, configs := a.(action.WriteConfigs)
		return configs
	})
	for _, n := range d.Nodes {
		if n.Reason == v1alpha1.ReasonChangedByOthers && strings.HasPrefix(n.Message, "Another controller") {
			c.breaks("truth", "node %s accuses another controller, and there is none: %s", n.Node, n.Message)
		}
		if n.State == node.Selecting && strings.HasPrefix(n.Message, "writing the configuration") && c.Plugin.Ready && !isWritten {
			c.breaks("progress", "node %s waits for a write that the operator withholds: %s", n.Node, n.Message)
		}
	}
}
