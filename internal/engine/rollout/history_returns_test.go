// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
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
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

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
		c.serial++
		p.UID, p.CreationTimestamp = types.UID(fmt.Sprint(name, "-", c.serial)), metav1.NewTime(c.Now)
		c.Policies = append(slices.Clone(c.Policies), p)
		c.allows(&p)
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
	c.serial++
	p.UID, p.CreationTimestamp = types.UID(fmt.Sprint(pool, "-", c.serial)), metav1.NewTime(c.Now)
	c.Policies = append(slices.Clone(c.Policies), p)
	c.allows(&p)
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
	c.Policies = slices.DeleteFunc(slices.Clone(c.Policies), func(o v1alpha1.GPUSharingPolicy) bool { return o.Name == pool })
	if alone {
		c.createAgain(others)
	}
}

// jobsEvent edits a policy, which drains no more, while short jobs follow one another on a node: the next one is bound
// as soon as the last has ended, and the agent reports it 2 s later.
func (c *run) jobsEvent(random *rand.Rand) {
	h := c.some(random)
	by, _, err := c.desired(h)
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
			c.countsAnew()
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
