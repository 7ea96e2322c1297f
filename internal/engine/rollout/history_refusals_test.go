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

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// refusals is what the API server refuses about a node.
type refusals struct {
	refuses        bool // every write of its GPUNode
	withoutGPUNode bool // to make its GPUNode again
}

// isRefused reports whether the API server refuses an action, or its object is not there.
func (c *run) isRefused(h *host, a action.Action) bool {
	_, reports := a.(action.Report)
	if h == nil || !reports && !action.SetsSpec(a) {
		return false
	}
	if h.refuses {
		c.tell("  the API server refuses it")
		c.Repeats.Refuse(a, "denied by webhook", c.controllersNow())
	}
	return h.refuses || h.withoutGPUNode
}

// refuseEvent has the API server refuse what is written of one GPUNode, for a while in which something else is asked of
// the nodes.
func (c *run) refuseEvent(random *rand.Rand) {
	h := c.some(random)
	if random.IntN(2) == 0 {
		h = c.all()[0] // nodes take their turns by name
	}
	if h.off {
		return
	}
	h.refuses = true
	c.tell("the API server refuses every write of GPUNode %s", h.Name)
	c.othersGoOn(h, random)
	h.refuses = false
	c.tell("the API server takes writes of GPUNode %s again", h.Name)
}

// unmadeEvent deletes the GPUNode of a node that the operator has changed, and the API server refuses to make it again
// for a while.
func (c *run) unmadeEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || h.Annotations[v1alpha1.AnnotationBaseline] == "" {
		return
	}
	c.loseGPUNode(h)
	h.withoutGPUNode = true
	c.tell("GPUNode %s is gone, and cannot be made again", h.Name)
	c.othersGoOn(h, random)
	h.withoutGPUNode = false
	c.tell("GPUNode %s is made again", h.Name)
}

// othersGoOn lets time pass while something of a node cannot be written, and looks whether a node waits for its turn
// that no other node has.
func (c *run) othersGoOn(but *host, random *rand.Rand) {
	for range random.IntN(3) {
		c.editEvent(random)
	}
	c.rest([]time.Duration{time.Hour, 2 * time.Hour}[random.IntN(2)], 900) // a change that has begun keeps its slot for half an hour
	d := c.step(true)
	for range 3 { // what is refused is tried again now and then, and has its turn in that reconcile
		if !slices.ContainsFunc(d.Actions, func(a action.Action) bool { return a.NodeName() == but.Name }) {
			break
		}
		c.lapse(time.Second)
		d = c.step(true)
	}
	if c.broken != "" || slices.ContainsFunc(c.all(), (*host).isKept) || len(c.fights) > 0 {
		return
	}
	idle := func(n rollout.NodeState) bool {
		return n.Node == but.Name || waitsForTurn(n) || node.NodeReady == node.StandingOf(n.State, n.Reason)
	}
	others := func(a action.Action) bool { return a.NodeName() != but.Name }
	if slices.ContainsFunc(d.Actions, others) || slices.ContainsFunc(d.Nodes, func(n rollout.NodeState) bool { return !idle(n) }) {
		return // one of them has the turn
	}
	for _, n := range d.Nodes {
		if n.Node != but.Name && waitsForTurn(n) {
			c.breaks("progress", "node %s waits (%s), and nobody is changing but %s, of which nothing can be written", n.Node, n.Message, but.Name)
		}
	}
}

func waitsForTurn(n rollout.NodeState) bool {
	return n.Reason == v1alpha1.ReasonWaitingForBudget || n.Reason == v1alpha1.ReasonWaitingForFirst
}

// garbageEvent has an agent report, and a device plugin advertise, what fits into no status of a policy.
func (c *run) garbageEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off {
		return
	}
	c.editEvent(random)
	resource := fmt.Sprintf("nvidia.com/gpu-%s", strings.Repeat("x", 60))
	c.tell("the agent of %s reports garbage, and its kubelet lists %s and 70 others", h.Name, resource)
	for range 12 {
		h.GPU.Status.Conditions = append(slices.DeleteFunc(slices.Clone(h.GPU.Status.Conditions), func(o metav1.Condition) bool {
			return o.Type == v1alpha1.ConditionApplyStalled
		}), metav1.Condition{
			Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionTrue, Reason: strings.Repeat("Garbage", 100),
			Message: strings.Repeat("garbage ", 4000), ObservedGeneration: h.GPU.Generation, LastTransitionTime: metav1.NewTime(c.Now),
		})
		h.Allocatable[resource] = 1
		for i := range 70 { // more than the status of a policy lists
			h.Allocatable[fmt.Sprint("nvidia.com/gpu.garbage-", i)] = 1
		}
		c.version[h.Name]++
		if c.step(true); c.broken != "" {
			return
		}
		c.lapse(time.Second)
	}
	maps.DeleteFunc(h.Allocatable, func(name string, _ int64) bool { return name == resource || strings.Contains(name, "garbage") })
	c.version[h.Name]++
	h.report()
}
