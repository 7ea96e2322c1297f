// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

func (c *run) ListPolicies() []v1alpha1.GPUSharingPolicy { return slices.Clone(c.Policies) }

func (c *run) UpdatePolicy(p *v1alpha1.GPUSharingPolicy) {
	at := &c.Policies[slices.IndexFunc(c.Policies, func(o v1alpha1.GPUSharingPolicy) bool { return o.Name == p.Name })]
	at.Spec = p.Spec
	at.Generation++
	c.allows(at)
}

func (c *run) DeletePolicy(name string) {
	c.Policies = slices.DeleteFunc(slices.Clone(c.Policies), func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == name })
}

func (c *run) MoveToPool(h *host, pool string) {
	h.pool = pool
	h.Labels[history.PoolLabel] = pool
	c.version[h.Name]++
}

func (c *run) ReplacePolicies(policies []v1alpha1.GPUSharingPolicy) {
	c.Policies = policies
	for i := range policies {
		p := &policies[i]
		c.serial++
		p.UID, p.CreationTimestamp = types.UID(fmt.Sprint(p.Name, "-", c.serial)), metav1.NewTime(c.Now)
		c.allows(p)
	}
}

// adds creates another policy.
func (c *run) adds(p v1alpha1.GPUSharingPolicy) {
	c.serial++
	p.UID, p.CreationTimestamp = types.UID(fmt.Sprint(p.Name, "-", c.serial)), metav1.NewTime(c.Now)
	c.Policies = append(slices.Clone(c.Policies), p)
	c.allows(&p)
}

// edits changes one policy.
func (c *run) edits(name string, change func(*v1alpha1.GPUSharingPolicy)) {
	p := &c.Policies[slices.IndexFunc(c.Policies, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == name })]
	change(p)
	c.UpdatePolicy(p)
	c.tell("policy %s is edited: %s", p.Name, history.Says(p))
}

// allows notes the budget of a policy.
func (c *run) allows(p *v1alpha1.GPUSharingPolicy) {
	slots, err := intstr.GetScaledValueFromIntOrPercent(p.Spec.Rollout.MaxUnavailable, len(c.hosts)+4, true) // more nodes may join
	if err != nil {
		panic(err)
	}
	c.slots[p.Name] = max(c.slots[p.Name], int32(slots))
}

// CountAnew counts the GPUs of nodes anew, but for those whose policy names the indexes that it had when it was first
// applied there.
func (c *run) CountAnew() {
	for _, h := range c.all() {
		spec := h.GPU.Spec
		if !slices.ContainsFunc(c.Policies, func(p v1alpha1.GPUSharingPolicy) bool {
			return p.Name == spec.PolicyName && spec.Numbering != nil && p.Spec.GPUSelector != nil && slices.Equal(p.Spec.GPUSelector.Indexes, spec.Numbering.Indexes)
		}) {
			h.countsAnew()
		}
	}
}

// manyEvent creates two dozen policies, of which several select each node, and deletes them after a while.
func (c *run) manyEvent(random *rand.Rand) {
	for i := range 24 {
		p := history.Policy(fmt.Sprint("many-", i), []string{"a", "b", "none"}[random.IntN(3)], random)
		p.Spec.Priority = int32(random.IntN(3))
		c.adds(p)
	}
	c.CountAnew()
	c.tell("there are %d policies", len(c.Policies))
	c.rest(time.Duration(2+random.IntN(30))*time.Minute, 150)
	c.Policies = slices.DeleteFunc(slices.Clone(c.Policies), func(p v1alpha1.GPUSharingPolicy) bool { return strings.HasPrefix(p.Name, "many-") })
	c.CountAnew()
	c.tell("there are %d policies", len(c.Policies))
}

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
		left, _ := plan.Node(spec.Devices, h.devices()) // a boot that no agent has reported yet may have done it (813761)
		needsIdle := func(s plan.Step) bool { return s.Needs() > plan.NeedsNothing }
		switch {
		case !slices.ContainsFunc(steps, needsIdle) || plan.OnlyComputeMode(steps) || !slices.ContainsFunc(left, needsIdle):
			h.asks, h.asksSince = 0, c.Now
		case h.asks > reconciles && c.Now.Sub(h.asksSince) > most:
			c.breaks("harmless", "node %s takes pods, and its agent is still asked: %s (%s)", h.Name, steps[0], c.states[h.Name])
		}
	}
}

// renameEvent has a policy advertise replicas under another name. While the kubelet still lists the devices of the
// former one as capacity, the plugin of a node advertises one device less than it must for a moment.
func (c *run) renameEvent(random *rand.Rand) {
	h := c.some(random)
	by, _, _ := c.Desired(h)
	if h.off || by == nil || by.Spec.Sharing.TimeSlicing == nil {
		return
	}
	c.edits(by.Name, func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Sharing.Advertise = &v1alpha1.Advertise{RenameByDefault: new(!plan.Renamed(p.Spec.Sharing))}
	})
	c.rest(keepsCapacity/2, 60)
	if c.broken != "" || h.off || !h.plugin.running || len(h.sick) > 0 {
		return
	}
	for _, name := range []string{"nvidia.com/gpu", "nvidia.com/gpu.shared"} {
		all := h.Allocatable[name]
		if all < 2 {
			continue
		}
		h.Allocatable[name] = all - 1
		c.version[h.Name]++
		c.tell("the device plugin of %s advertises %d %s", h.Name, h.Allocatable[name], name)
		for range 3 {
			c.step(true)
			c.lapse(time.Second)
		}
		if h.Allocatable[name] == all-1 {
			h.Allocatable[name] = all
			c.version[h.Name]++
		}
		return
	}
}

// called is a resource that a message calls unhealthy.
var called = regexp.MustCompile(`\d+ of (nvidia\.com/[^,) ]+)`)

// calledUnhealthy looks whether a device is called unhealthy of a resource that the node neither advertises nor must.
func (c *run) calledUnhealthy(d rollout.Decision) {
	for _, n := range d.Nodes {
		_, says, is := strings.Cut(n.Message, "unhealthy (")
		h := c.hosts[n.Node]
		if !is || h == nil || n.Expected == nil {
			continue
		}
		for _, name := range called.FindAllStringSubmatch(says, -1) {
			if n.Expected[name[1]] == 0 && h.Allocatable[name[1]] == 0 {
				c.breaks("truth", "%s of node %s is called unhealthy, which is to advertise %v: %s", name[1], n.Node, n.Expected, n.Message)
			}
		}
	}
}

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
		history.Edit(c, random)
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
	history.Edit(c, random)
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
