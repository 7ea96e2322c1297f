// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// applied is a miniature with MIG on demand in mode Apply: beside the operator it has tenants with pods that wait, a scheduler, and a kubelet that
// gives a bound pod, a while later, any instance that NVIDIA's device plugin has listed. broken is the first invariant that does not hold:
//
//	1 no instance is destroyed that a pod holds, or a bound pod may be given
//	2 no pod is evicted, no MIG mode changed, no node rebooted, and no GPU left without an instance
//	3 a GPU has no instance that the policy does not allow, and the reserve stays
//	4 nothing begins while the rollout is paused
//	5 a change has a reason: more pods wait than the scheduler finds instances for; and a GPU is changed disruptively once within demand.Hold
//	6 the kubelet rejects no pod because of a change
//	7 the same world has the same decision, whatever the order of lists
//	8 for a pod, whatever its priority, no more instances of a profile are destroyed than had been idle for idleSeconds when the agent was asked
//	9 no ConfigMap is written for demand, and one node at most is tainted
//	10 pods that never start, whatever their names, keep neither others from starting nor GPUs from resting
//	11 of two policies that could serve a pod, one makes instances for it
type applied struct {
	*site
	t             *testing.T
	random        *rand.Rand
	waiting       []*corev1.Pod
	bound         map[string]boundPod // not admitted yet, by name
	lastHeld      map[string]time.Time
	disrupted     map[string]time.Time                // by GPU
	idle          map[string]map[string]time.Duration // for how long instances had been, by GPU, when the agent was asked to change it last
	pods          int
	repartitioned int
	died          map[string]bool      // nodes, with the taint of a change
	booted        map[string]time.Time // nodes, lately: no pod has had their instances, whatever their times say
	edited        bool                 // the policy, so that the rollout may do what it does
	races         bool                 // pods come when a change for demand begins
	faulty        bool
	late          []late
	attempts      map[string]demand.Attempts // by policy
	saw           []any                      // what the last review was about; nil: it did not end
	next          time.Time                  // of a review though nothing changes; zero: never
	layouts       [2]pure.Memory
	onDRA         bool   // NVIDIA's DRA driver serves the nodes (seeds from onDriver on)
	floods        string // the profile for which a tenant has pods wait that never start; empty: none does
	flooded       int    // how many
	broken        string
	told          []string
	until         int // when it broke
}

type boundPod struct {
	tolerates      bool
	node, resource string
	chosen         time.Time // by the scheduler, for a claim
	admitted       time.Time // when the kubelet comes to it
}

// late is a pod that the scheduler has chosen a node for, before it saw a taint.
type late struct {
	pod    *corev1.Pod
	node   string
	device string // on NVIDIA's DRA driver
	since  time.Time
}

func newApplied(t *testing.T, seed uint64) *applied {
	t.Helper()
	c := &applied{
		site: newSite(), t: t, random: rand.New(rand.NewPCG(seed, 46)), bound: map[string]boundPod{}, lastHeld: map[string]time.Time{},
		disrupted: map[string]time.Time{}, idle: map[string]map[string]time.Duration{}, edited: true, died: map[string]bool{}, booted: map[string]time.Time{},
		onDRA: seed >= onDriver,
	}
	c.leads()
	if seed%onDriver == 0 {
		return c
	}
	for i := range 1 + c.random.IntN(3) {
		c.comes(fmt.Sprintf("n%d", i), []sim.Model{sim.A100, sim.A100}[:1+c.random.IntN(2)]...)
	}
	c.Policies = []v1alpha1.GPUSharingPolicy{c.policy("research")}
	if c.random.IntN(3) == 0 {
		c.two()
	}
	for range 100 {
		c.step()
	}
	c.edited = false
	c.breaks(!c.isReady(), "progress: the policy is not Ready at the beginning: %v", c.Policies[0].Status.Conditions)
	return c
}

// policy is one on demand for all nodes.
func (c *applied) policy(name string) v1alpha1.GPUSharingPolicy {
	sharing := v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{
			Fill: []v1alpha1.MIGProfile{"1g", "2g", "3g", "7g"}[c.random.IntN(4)],
			OnDemand: &v1alpha1.MIGOnDemand{
				Mode:        v1alpha1.OnDemandModeApply,
				Profiles:    [][]v1alpha1.MIGProfile{{"1g", "2g", "3g", "7g"}, {"1g", "3g"}, {"1g", "2g"}, {"2g", "3g"}}[c.random.IntN(4)],
				IdleSeconds: []int32{30, 60, 300}[c.random.IntN(3)],
			},
		}},
	}}
	if of := sharing.MIG.Layouts[0].OnDemand; c.random.IntN(3) == 0 {
		of.Reserve = []v1alpha1.MIGReserve{{Profile: of.Profiles[0], Count: 1}}
	}
	return policyOf(name, sharing, func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Rollout.Drain.Mode = []v1alpha1.DrainMode{v1alpha1.DrainModeEvict, v1alpha1.DrainModeWaitForIdle, v1alpha1.DrainModeNever}[c.random.IntN(3)]
	})
}

const poolLabel = "pool"

// two adds a policy for a pool of nodes, which the other one governs once that is gone, or never. The pool can be empty; n0 is not of it.
func (c *applied) two() {
	for name, h := range c.hosts {
		h.Labels[poolLabel] = map[bool]string{false: "a", true: "b"}[name != "n0"]
		c.version[name]++
	}
	other := c.policy("teaching")
	other.Spec.NodeSelector, other.Spec.Priority = &v1alpha1.NodeSelector{MatchLabels: map[string]string{poolLabel: "b"}}, 5
	if c.random.IntN(2) == 0 {
		c.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{poolLabel: "a"}}
	}
	c.Policies = append(c.Policies, other)
}

// of is the policy that governs a node; nil: none.
func (c *applied) of(h *host) *v1alpha1.GPUSharingPolicy {
	for i := range c.Policies {
		if c.Policies[i].Name == h.GPU.Spec.PolicyName {
			return &c.Policies[i]
		}
	}
	return nil
}

// leads is another controller that leads.
func (c *applied) leads() {
	c.memory, c.sleeps, c.attempts, c.saw, c.Repeats = mostlyRemembering(), sleeping{repeats: true}, map[string]demand.Attempts{}, nil, &action.Repeats{}
}

func (c *applied) isReady() bool {
	for _, h := range c.hosts {
		if !condition.IsTrue(h.GPU.Status.Conditions, v1alpha1.ConditionReady) {
			return false
		}
	}
	return true
}

func (c *applied) tell(format string, args ...any) {
	c.told = append(c.told, fmt.Sprintf("%s "+format, append([]any{c.Now.UTC().Format(time.TimeOnly)}, args...)...))
}

func (c *applied) breaks(is bool, format string, args ...any) {
	if is && c.broken == "" {
		c.broken = fmt.Sprintf(format, args...)
		c.tell("BROKEN")
		c.until = len(c.told)
	}
}

// step is a second, in which every player has a turn.
func (c *applied) step() { c.steps(time.Second) }

func (c *applied) steps(d time.Duration) {
	c.flood()
	c.schedule()
	c.admit()
	if c.random.IntN(2) == 0 {
		c.decides()
	}
	if c.random.IntN(8) > 0 {
		c.acts()
	}
	c.passes(d)
}

// flood is a tenant whose pods no node can start, such as for want of a volume. Now and then it makes one anew under another name.
func (c *applied) flood() {
	c.waiting = slices.DeleteFunc(c.waiting, func(pod *corev1.Pod) bool {
		return pod.Namespace == flooding && (c.floods == "" || c.random.IntN(60) == 0)
	})
	n := 0
	for _, pod := range c.waiting {
		if pod.Namespace == flooding {
			n++
		}
	}
	for ; c.floods != "" && n < c.flooded; n++ {
		c.waitsIn(flooding, c.floods, int32(c.random.IntN(3)))
	}
}

// waits makes a pod that the scheduler finds no room for.
func (c *applied) waits(profile string, priority int32) {
	c.waitsIn("user", profile, priority)
	c.tell("pod %s waits for %s", c.waiting[len(c.waiting)-1].Name, profile)
}

const flooding = "flood" // the namespace of the tenant that floods

func (c *applied) waitsIn(namespace, profile string, priority int32) {
	c.pods++
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint("p", c.pods)}}
	pod.Spec.Priority = &priority
	pod.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
		corev1.ResourceName(plan.ResourceOf(profile)): resource.MustParse("1"),
	}}}}
	if c.races && c.random.IntN(6) == 0 {
		pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	}
	if len(c.Policies) > 1 && c.random.IntN(4) == 0 {
		pod.Spec.NodeSelector = map[string]string{poolLabel: []string{"a", "b"}[c.random.IntN(2)]}
	}
	c.waiting = append(c.waiting, pod)
}

func resourceOf(pod *corev1.Pod) string {
	for name := range pod.Spec.Containers[0].Resources.Limits {
		return string(name)
	}
	return ""
}

// schedule binds pods that wait to nodes that offer what they ask for. It may bind one late, by so much as a change waits for after its taint, to a node
// that it saw without one.
func (c *applied) schedule() {
	c.late = slices.DeleteFunc(c.late, func(l late) bool {
		binds := c.random.IntN(2) == 0 || c.Now.Sub(l.since) >= 2*time.Second
		if binds {
			c.binds(l.pod, l.node, l.device)
		}
		return binds
	})
	var still []*corev1.Pod
	for _, pod := range c.waiting {
		name := c.room(pod)
		device := c.device(c.hosts[name], resourceOf(pod))
		switch {
		case name != "" && c.random.IntN(4) == 0:
			c.late = append(c.late, late{pod, name, device, c.Now})
		case name != "":
			c.binds(pod, name, device)
		default:
			if len(pod.Status.Conditions) == 0 {
				pod.Status.Conditions = []corev1.PodCondition{{
					Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: c.reason(pod), LastTransitionTime: metav1.NewTime(c.Now),
				}}
			}
			still = append(still, pod)
		}
	}
	c.waiting = still
}

// room names the first node that offers a pod what it asks for; empty: none does.
func (c *applied) room(pod *corev1.Pod) string {
	if pod.Namespace == flooding || len(pod.Spec.Volumes) > 0 {
		return ""
	}
	of := resourceOf(pod)
	for _, node := range slices.Sorted(maps.Keys(c.hosts)) {
		if c.left(c.hosts[node], pod, of) > 0 {
			return node
		}
	}
	return ""
}

// left is how many instances the scheduler finds for a pod on a node.
func (c *applied) left(h *host, pod *corev1.Pod, of string) int64 {
	if pool, selects := pod.Spec.NodeSelector[poolLabel]; len(h.Taints) > 0 && len(pod.Spec.Tolerations) == 0 || selects && h.Labels[poolLabel] != pool {
		return 0
	}
	if c.onDRA {
		return int64(len(c.devices(h, of)))
	}
	left := h.Allocatable[of]
	for _, p := range h.Pods {
		left -= p.Requests[of]
	}
	for _, l := range c.late {
		if l.node == h.Name && resourceOf(l.pod) == of {
			left--
		}
	}
	return max(0, left)
}

// reason is why a pod waits: a queue holds it back, or another scheduler has its own words.
func (c *applied) reason(pod *corev1.Pod) string {
	if pod.Namespace == flooding {
		return []string{corev1.PodReasonUnschedulable, corev1.PodReasonUnschedulable, corev1.PodReasonSchedulingGated, "NotEnoughResources"}[c.random.IntN(4)]
	}
	return corev1.PodReasonUnschedulable
}

// preempts is a scheduler that ends a pod so that one of a higher priority has its instance.
func (c *applied) preempts(h *host) {
	for _, p := range h.Pods {
		for _, pod := range c.waiting {
			if _, starts := c.bound[p.Name]; !starts && p.Namespace == "user" && pod.Namespace == "user" && p.Requests[resourceOf(pod)] > 0 && *pod.Spec.Priority > 0 {
				c.tell("pod %s ends for pod %s", p.Name, pod.Name)
				pod.Status.NominatedNodeName = h.Name
				c.end(h, p.Name)
				return
			}
		}
	}
}

// edits is, one time in three, an administrator who edits the policy, or deletes it and makes it anew. The users have left, and the rollout may do what it does until all is as it should be.
func (c *applied) edits() {
	if c.random.IntN(3) != 0 {
		return
	}
	c.leave()
	c.edited = true
	at := c.random.IntN(len(c.Policies))
	p := c.Policies[at]
	if p.Generation++; c.random.IntN(2) == 0 {
		c.tell("policy %s is deleted", p.Name)
		c.Policies, p.Status = slices.Delete(c.Policies, at, at+1), v1alpha1.GPUSharingPolicyStatus{}
		for range c.random.IntN(60) {
			c.steps(5 * time.Second)
		}
		c.Policies = slices.Insert(c.Policies, at, p)
	}
	of := p.DeepCopy().Spec.Sharing.MIG
	of.Layouts[0].OnDemand.Profiles = [][]v1alpha1.MIGProfile{{"1g", "2g", "3g"}, {"1g", "7g"}, {"3g"}}[c.random.IntN(3)]
	of.Layouts[0].OnDemand.Reserve = nil
	p.Spec.Sharing.MIG, p.Spec.Rollout.Paused = of, false
	c.Policies[at] = p
	c.tell("the policy lets %v be made", of.Layouts[0].OnDemand.Profiles)
	for n := 0; n < 600 && (n < 60 || !c.isReady()); n++ {
		c.steps(5 * time.Second)
	}
	c.edited = !c.isReady() // an agent that is away, or a driver that fails
	clear(c.disrupted)
}

// binds has a pod come to a node, where NVIDIA's DRA driver serves that to a device of it.
func (c *applied) binds(pod *corev1.Pod, node, device string) {
	h := c.hosts[node]
	if c.onDRA {
		c.allocates(h, pod, device)
		return
	}
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "user", Name: pod.Name, UID: "uid-" + pod.Name, Controller: "ReplicaSet", GPU: true, Scheduled: c.Now, Requests: map[string]int64{resourceOf(pod): 1},
		Tolerates: len(pod.Spec.Tolerations) > 0,
	})
	c.version[node]++
	after := time.Duration(c.random.IntN(4)) * time.Second
	if c.random.IntN(8) == 0 {
		after *= 30 // the kubelet is slow, or away
	}
	c.bound[pod.Name] = boundPod{tolerates: len(pod.Spec.Tolerations) > 0, node: node, resource: resourceOf(pod), admitted: c.Now.Add(after)}
	c.tell("pod %s is bound to %s", pod.Name, node)
}

// admit is the kubelet, which gives a pod an instance that the plugin listed.
func (c *applied) admit() {
	for _, name := range slices.Sorted(maps.Keys(c.bound)) {
		b := c.bound[name]
		h := c.hosts[b.node]
		if c.Now.Before(b.admitted) && !h.off {
			continue
		}
		if c.onDRA && !h.off {
			c.prepares(h, name)
			continue
		}
		if delete(c.bound, name); h.off {
			continue // the pod goes when the machine boots
		}
		index, instance := c.free(h, b.resource)
		if instance < 0 {
			c.breaks(!b.tolerates && !c.edited && h.broken == nil && !c.hasBooted(h, c.Now), "6: the kubelet of %s rejects pod %s, which asks for %s, or gives it an instance that is gone", b.node, name, b.resource)
			h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.Name == name })
			continue
		}
		h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.Name == name })
		c.hold(h, name, index, instance)
		h.Pods[len(h.Pods)-1].Requests = map[string]int64{b.resource: 1}
		c.tell("pod %s has instance %d of GPU %d of %s", name, instance, index, b.node)
	}
}

// free is an instance of those that the plugin listed, of which the kubelet gives any that no pod has; negative: there is none, or that one is gone.
func (c *applied) free(h *host, of string) (index, instance int) {
	var list [][2]int
	for _, uuid := range h.plugin.uuids {
		if at := h.place(uuid); h.plugin.kinds[uuid] == of && h.Allocatable[of] > 0 && (at[1] < 0 || !h.devices()[at[0]].InUse(at[1])) {
			list = append(list, at)
		}
	}
	if len(list) == 0 {
		return 0, -1
	}
	chosen := list[c.random.IntN(len(list))]
	return chosen[0], chosen[1]
}

// place is the index of the GPU that has an instance, and its ID; negative: it is gone.
func (h *host) place(uuid string) [2]int {
	for at, d := range h.devices() {
		for _, i := range d.State.Instances {
			if i.UUID == uuid {
				return [2]int{at, i.ID}
			}
		}
	}
	return [2]int{0, -1}
}

// decides is a reconcile of the demand controller, which may end before it has written everything. It reads what others have as well, and must not change it.
func (c *applied) decides() {
	s := c.withoutNodes()
	s.Policies = c.Policies
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		s.Nodes = append(s.Nodes, *c.hosts[name].Node)
	}
	pods := slices.DeleteFunc(slices.Clone(c.waiting), func(pod *corev1.Pod) bool { return !demand.Waits(pod) })
	sees := c.sees(pods)
	if c.asleep(sees) {
		return
	}
	c.saw = nil
	of := map[string]*v1alpha1.GPUSharingPolicy{"": nil}
	var asked, same []demand.Asked
	for i := range s.Policies {
		p := &s.Policies[i]
		if of[p.Name] = p; demand.Of(p) == nil {
			continue
		}
		asked = append(asked, demand.Asked{Policy: p, Pods: pods, Attempts: c.attempts[p.Name]})
		same = append(same, demand.Asked{Policy: p, Pods: slices.Clone(pods), Attempts: maps.Clone(c.attempts[p.Name])})
	}
	is := demand.Review(&c.layouts[0], &s, asked...)
	c.remembers(is, pods)
	if c.random.IntN(8) == 0 {
		if c.random.IntN(8) == 0 {
			c.layouts[1] = pure.Memory{}
		}
		for _, o := range same {
			c.random.Shuffle(len(o.Pods), func(a, b int) { o.Pods[a], o.Pods[b] = o.Pods[b], o.Pods[a] })
		}
		slices.Reverse(s.Nodes)
		again := demand.Review(&c.layouts[1], &s, same...)
		c.breaks(!reflect.DeepEqual(is, again), "7: %v is decided, and in another order %v", is, again)
	}
	c.servedOnce(is)
	c.needed(is)
	for i := range c.Policies {
		c.Policies[i].Status.OnDemand = is[c.Policies[i].Name].Status
	}
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		h := c.hosts[name]
		p, known := of[h.GPU.Spec.PolicyName]
		decided := is[h.GPU.Spec.PolicyName].Decided[name]
		switch {
		case c.random.IntN(10) == 0:
			return // it ends
		case !known || reflect.DeepEqual(h.GPU.Status.Demand, decided):
			continue
		}
		had := slices.SortedFunc(slices.Values(h.GPU.Status.Demand), func(a, b v1alpha1.GPUDemand) int { return strings.Compare(a.UUID, b.UUID) })
		c.breaks(len(had) > 0 && reflect.DeepEqual(had, decided), "9: %s is written again in another order", name)
		if p != nil {
			c.hasReason(h, decided, p)
		}
		c.tell("demand of %s: %v", name, says(decided))
		c.rivals(h, decided)
		h.GPU.Status.Demand = decided
	}
	c.saw = sees
}

// rivals are pods that come just before a GPU loses what they ask for. For some the scheduler has chosen the node already.
func (c *applied) rivals(h *host, decided []v1alpha1.GPUDemand) {
	destroys := map[string]bool{}
	for _, e := range decided {
		c.changes(h, e, map[string]bool{}, destroys)
	}
	for _, of := range slices.Sorted(maps.Keys(destroys)) {
		if !c.races || c.edited || c.random.IntN(4) > 0 {
			continue
		}
		c.waits(strings.TrimPrefix(of, plan.ResourcePrefix), 0)
		if last := len(c.waiting) - 1; c.random.IntN(2) == 0 && c.left(h, c.waiting[last], of) > 0 {
			c.late, c.waiting = append(c.late, late{c.waiting[last], h.Name, c.device(h, of), c.Now}), c.waiting[:last]
		}
	}
}

// asleep reports whether nothing has woken the demand controller since its last review.
func (c *applied) asleep(sees []any) bool {
	return c.saw != nil && (c.next.IsZero() || c.Now.Before(c.next)) && reflect.DeepEqual(c.saw, sees)
}

// remembers keeps of a review the attempts, and when the controller looks again though nothing changes.
func (c *applied) remembers(is map[string]demand.Reviewed, waiting []*corev1.Pod) {
	c.next = time.Time{}
	wakesAt := func(at time.Time) {
		if at.After(c.Now) && (c.next.IsZero() || at.Before(c.next)) {
			c.next = at
		}
	}
	for name := range is {
		c.attempts[name] = is[name].Attempts
		wakesAt(is[name].Next)
	}
	for _, pod := range waiting {
		wakesAt(cluster.Scheduled(pod).LastTransitionTime.Add(pure.Aged))
	}
}

// sees is what wakes the demand controller when it changes (watch.go of internal/controller/demand).
func (c *applied) sees(waiting []*corev1.Pod) (sees []any) {
	for i := range c.Policies {
		sees = append(sees, c.Policies[i].Name, c.Policies[i].Generation)
	}
	for _, pod := range waiting {
		sees = append(sees, pod.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		h := c.hosts[name]
		of := v1alpha1.GPUNode{Spec: v1alpha1.GPUNodeSpec{PolicyName: h.GPU.Spec.PolicyName, Devices: h.GPU.Spec.Devices}}
		of.Status.Devices, of.Status.Rollout.Failed = h.GPU.Status.Devices, h.GPU.Status.Rollout.Failed
		sees = append(sees, of.DeepCopy(), condition.IsTrue(h.GPU.Status.Conditions, v1alpha1.ConditionReady), maps.Clone(h.Labels), slices.Clone(h.Taints),
			h.Unhealthy(nil))
		for _, p := range h.Pods {
			if len(p.Requests) > 0 {
				sees = append(sees, p.UID)
			}
		}
	}
	return sees
}

// servedOnce holds what is new of all policies to invariant 11.
func (c *applied) servedOnce(is map[string]demand.Reviewed) {
	by := map[string]string{}
	for policy, of := range is {
		for name, entries := range of.Decided {
			for _, e := range entries {
				if e.FirstPod == "" || slices.ContainsFunc(c.hosts[name].GPU.Status.Demand, func(o v1alpha1.GPUDemand) bool { return o.UUID == e.UUID && o.FirstPod == e.FirstPod }) {
					continue
				}
				c.breaks(by[e.FirstPod] != "" && by[e.FirstPod] != policy, "11: two policies make instances for pod %s", e.FirstPod)
				by[e.FirstPod] = policy
			}
		}
	}
}

// needed holds what is new to invariant 5: it makes instances of which the scheduler finds too few. Those of another policy may help a pod for which it
// leaves them, and a reserve is filled again.
func (c *applied) needed(is map[string]demand.Reviewed) {
	leaves := func(d v1alpha1.DemandStatus) bool { return d.Reason == v1alpha1.ReasonAdvertisedNotScheduled }
	makes, destroys := map[string]bool{}, map[string]bool{}                                                            // by resource
	others := func(h *host) bool { return h.GPU.Spec.PolicyName != "" && h.GPU.Spec.PolicyName != c.Policies[0].Name } // also of one that was deleted just now (488)
	for _, of := range is {
		if len(is) > 1 || slices.ContainsFunc(slices.Collect(maps.Values(c.hosts)), others) || slices.ContainsFunc(of.Status.Requests, leaves) || len(c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand.Reserve) > 0 {
			return
		}
		for name, entries := range of.Decided {
			for _, e := range entries {
				c.changes(c.hosts[name], e, makes, destroys)
				c.differs(c.hosts[name], e, map[string]bool{}, destroys) // also what was decided before, and has not begun
			}
		}
	}
	for resource := range makes {
		wait, left := c.short(resource)
		c.breaks(!destroys[resource] && wait > 0 && wait <= left, "5: %s is made for %d pods that wait, for which %d are left", resource, wait, left)
	}
}

// changes notes of which resources an entry that is new makes instances for a pod, and destroys some.
func (c *applied) changes(h *host, e v1alpha1.GPUDemand, makes, destroys map[string]bool) {
	same := func(o v1alpha1.GPUDemand) bool {
		return o.UUID == e.UUID && reflect.DeepEqual(o.Instances, e.Instances)
	}
	if !slices.ContainsFunc(h.GPU.Status.Demand, same) {
		c.differs(h, e, makes, destroys)
	}
}

// differs notes the same of any entry.
func (c *applied) differs(h *host, e v1alpha1.GPUDemand, makes, destroys map[string]bool) {
	at := slices.IndexFunc(h.devices(), func(d gpu.Device) bool { return d.UUID == e.UUID })
	if at < 0 {
		return
	}
	has, will := plan.ByProfile(plan.Observed(h.devices()[at]).Instances), plan.ByProfile(e.Instances)
	for profile, n := range will {
		if n > has[profile] && e.FirstPod != "" {
			makes[plan.ResourceOf(profile)] = true
		}
	}
	for profile, n := range has {
		if n > will[profile] {
			destroys[plan.ResourceOf(profile)] = true
		}
	}
}

// short is how many pods wait for a resource, and how many the scheduler finds for the one for which it finds the fewest.
func (c *applied) short(resource string) (wait, left int64) {
	for _, pod := range c.waiting {
		if resourceOf(pod) != resource {
			continue
		}
		found := int64(0)
		for _, h := range c.hosts {
			if !h.IsLost() && !h.isTainted() { // who tolerates that would be bound there, and would not run
				found += c.left(h, pod, resource)
			}
		}
		if wait++; wait == 1 || found < left {
			left = found
		}
	}
	return wait, left
}

func says(entries []v1alpha1.GPUDemand) (list []string) {
	for _, e := range entries {
		list = append(list, fmt.Sprintf("%s %v for %q, failed %d times, since %s", e.UUID[len(e.UUID)-4:], e.Instances, e.FirstPod, e.Failures, e.SinceTime.UTC().Format(time.TimeOnly)))
	}
	return list
}

// hasReason holds what is new to invariants 4 and 5.
func (c *applied) hasReason(h *host, entries []v1alpha1.GPUDemand, p *v1alpha1.GPUSharingPolicy) {
	for _, e := range entries {
		if slices.ContainsFunc(h.GPU.Status.Demand, func(o v1alpha1.GPUDemand) bool {
			return reflect.DeepEqual(o.Instances, e.Instances) && o.UUID == e.UUID
		}) {
			continue
		}
		c.breaks(p.Spec.Rollout.Paused && e.FirstPod != "", "4: GPU %s is to change for pod %s while the rollout is paused", e.UUID, e.FirstPod)
		c.breaks(e.FirstPod != "" && !slices.ContainsFunc(c.waiting, func(pod *corev1.Pod) bool {
			return pod.Namespace+"/"+pod.Name == e.FirstPod && cluster.Scheduled(pod).Reason == corev1.PodReasonUnschedulable
		}), "5: GPU %s is to change for pod %s, which does not wait", e.UUID, e.FirstPod)
	}
}

// acts is a reconcile of the rollout, which may end before it has done everything.
func (c *applied) acts() {
	d := c.sleeps.decide(c.watched(), c.memory.decide)
	for _, a := range d.Actions {
		if c.random.IntN(12) == 0 {
			break
		}
		switch a := a.(type) {
		case action.Evict:
			c.breaks(!c.edited, "2: pod %s is evicted", a.Pod)
		case action.WriteConfigs:
			c.breaks(!c.edited, "9: the ConfigMap is written")
		case action.SetSpec:
			c.breaks(a.Spec.Reboot != nil, "2: node %s may be rebooted", a.Node)
			c.begins(c.hosts[a.Node], a.Spec)
		}
		c.tell("%s", a)
		c.do(a)
		c.Repeats.Note(a, c.Now)
	}
	tainted := map[string]int{}
	for name, h := range c.hosts {
		if c.died[name] = c.died[name] && h.isTainted(); h.isTainted() && !c.died[name] {
			tainted[h.GPU.Spec.PolicyName]++
		}
	}
	for policy, nodes := range tainted {
		c.breaks(nodes > 1 && !c.edited, "9: %d nodes of policy %s are tainted", nodes, policy)
	}
	for i := range c.Policies {
		p := &c.Policies[i]
		onDemand := p.Status.OnDemand
		p.Status = d.Policies[p.Name]
		p.Status.OnDemand = onDemand
	}
}

// begins holds a change of what the agent is asked for to invariants 4 and 5.
func (c *applied) begins(h *host, spec v1alpha1.GPUNodeSpec) {
	p := c.of(h)
	if c.edited || p == nil {
		for _, d := range spec.Devices {
			delete(c.idle, d.UUID)
		}
		return
	}
	for _, d := range spec.Devices {
		was := slices.IndexFunc(h.GPU.Spec.Devices, func(o v1alpha1.DeviceSpec) bool { return o.UUID == d.UUID })
		if was < 0 || plan.Same(h.GPU.Spec.Devices[was].Sharing, d.Sharing) {
			continue
		}
		c.idle[d.UUID] = map[string]time.Duration{}
		for uuid, at := range c.lastHeld {
			c.idle[d.UUID][uuid] = c.Now.Sub(at)
		}
		c.breaks(p.Spec.Rollout.Paused, "4: GPU %s begins to change while the rollout is paused", d.UUID)
		good := h.GPU.Status.Rollout.LastGood
		back := good != nil && slices.ContainsFunc(good.Devices, func(o v1alpha1.DeviceSpec) bool { return o.UUID == d.UUID && plan.Same(o.Sharing, d.Sharing) })
		if back {
			delete(c.idle, d.UUID) // what a change that failed has made goes again
		}
		if back || !loses(h.GPU.Spec.Devices[was].Sharing.Instances, d.Sharing.Instances) {
			continue
		}
		c.breaks(c.Now.Sub(c.disrupted[d.UUID]) < pure.Hold, "5: GPU %s is changed again after %s", d.UUID, c.Now.Sub(c.disrupted[d.UUID]))
		c.disrupted[d.UUID] = c.Now
		for _, e := range h.GPU.Status.Demand {
			if e.UUID == d.UUID {
				c.disrupted[d.UUID] = e.SinceTime.Time // when it was decided
			}
		}
	}
}

func loses(was, is []v1alpha1.InstanceCount) bool {
	return slices.ContainsFunc(was, func(w v1alpha1.InstanceCount) bool {
		return !slices.ContainsFunc(is, func(i v1alpha1.InstanceCount) bool { return i.Profile == w.Profile && i.Count >= w.Count })
	})
}

// passes lets time pass, in which the agents act, and looks at what they did.
func (c *applied) passes(d time.Duration) {
	before := map[string][]gpu.Device{}
	for name, h := range c.hosts {
		before[name] = h.devices()
	}
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		c.hosts[name].late = c.random.IntN(3) == 0 && c.random.IntN(3) > 0
	}
	c.tick(d)
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		h := c.hosts[name]
		devices := h.devices()
		for at, is := range devices {
			c.looks(h, before[name][at], is)
		}
		c.reportHeld(h, devices)
	}
}

// looks holds what an agent did to a GPU to the invariants.
func (c *applied) looks(h *host, was, is gpu.Device) {
	if c.edited || c.of(h) == nil {
		return
	}
	c.breaks(was.State.MIG != is.State.MIG, "2: the MIG mode of GPU %s changes", is.UUID)
	c.breaks(is.State.MIG && len(is.State.Instances) == 0 && !c.faulty, "2: GPU %s has no instance", is.UUID)
	layout := c.of(h).Spec.Sharing.MIG.Layouts[0]
	for _, i := range is.State.Instances {
		slice, _, _ := strings.Cut(i.Profile, ".")
		c.breaks(v1alpha1.MIGProfile(slice) != layout.Fill && !slices.Contains(layout.OnDemand.Profiles, v1alpha1.MIGProfile(slice)), "3: GPU %s has an instance %s", is.UUID, i.Profile)
	}
	gone, destroyed := map[string]bool{}, map[string]int{}
	for _, i := range was.State.Instances {
		if slices.ContainsFunc(is.State.Instances, func(o gpu.Instance) bool { return o.UUID == i.UUID }) {
			continue
		}
		gone[plan.ResourceOf(i.Profile)] = true
		c.breaks(was.InUse(i.ID), "1: instance %s of GPU %s is destroyed, which a pod holds", i.Profile, is.UUID)
		destroyed[i.Profile]++
	}
	c.tooMany(h, was, is, destroyed)
	c.keepsClaimed(h, was, is)
	for name, b := range c.bound {
		c.breaks(!c.onDRA && !b.tolerates && b.node == h.Name && gone[b.resource], "1: an instance %s of %s is destroyed, which pod %s may be given", b.resource, h.Name, name)
	}
}

// tooMany holds how many instances of each profile were destroyed to how many were idle long enough.
func (c *applied) tooMany(h *host, was, is gpu.Device, destroyed map[string]int) {
	layout := c.of(h).Spec.Sharing.MIG.Layouts[0]
	for profile, n := range destroyed {
		for _, i := range was.State.Instances {
			if i.Profile == profile && c.idle[is.UUID][i.UUID] >= time.Duration(layout.OnDemand.IdleSeconds)*time.Second {
				n--
			}
		}
		at := slices.IndexFunc(h.GPU.Status.Demand, func(e v1alpha1.GPUDemand) bool { return e.UUID == is.UUID && e.FirstPod != "" })
		c.breaks(n > 0 && at >= 0 && c.idle[is.UUID] != nil && !c.died[h.Name] && !c.hasBooted(h, c.Now), "8: %d instances %s of GPU %s too many are destroyed", n, profile, is.UUID)
	}
}

// reportHeld is the agent's report since when no pod has had each instance that none has.
func (c *applied) reportHeld(h *host, devices []gpu.Device) {
	held := map[string]bool{}
	for _, d := range devices {
		for _, i := range d.State.Instances {
			held[i.UUID] = d.InUse(i.ID)
			if _, known := c.lastHeld[i.UUID]; !known || held[i.UUID] {
				c.lastHeld[i.UUID] = c.Now
			}
		}
	}
	for d := range h.GPU.Status.Devices {
		for i := range h.GPU.Status.Devices[d].Instances {
			of := &h.GPU.Status.Devices[d].Instances[i]
			if of.LastHeldTime = (metav1.Time{}); !held[of.UUID] {
				of.LastHeldTime = metav1.NewTime(c.lastHeld[of.UUID].Truncate(time.Second))
			}
		}
	}
}

// endsOne ends a pod of a node that has started. What the agent reports is of a moment before, now and then.
func (c *applied) endsOne(h *host) {
	for _, p := range h.Pods {
		if _, starts := c.bound[p.Name]; p.Namespace == "user" && !starts {
			c.tell("pod %s ends", p.Name)
			reported := h.GPU.Status.DeepCopy()
			if c.end(h, p.Name); c.random.IntN(2) == 0 {
				h.GPU.Status = *reported
			}
			return
		}
	}
}

// happens is what nobody of the operator does.
func (c *applied) happens() {
	h := c.hosts[fmt.Sprintf("n%d", c.random.IntN(len(c.hosts)))]
	profiles := []string{"1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb", "4g.20gb"}
	event := c.random.IntN(21)
	c.upgradesDriver(h)
	if h.off && event%3 == 0 { // most do not stay away for long
		event = 20
	}
	switch event {
	case 20:
		c.turnsOff(h)
	case 0, 1, 2, 3, 4:
		c.come(profiles)
	case 5, 6, 7, 8:
		c.endsOne(h)
	case 9:
		c.deletes()
	case 10:
		p := &c.Policies[c.random.IntN(len(c.Policies))]
		p.Spec.Rollout.Paused, p.Generation = !p.Spec.Rollout.Paused, p.Generation+1
		c.tell("policy %s is paused: %v", p.Name, p.Spec.Rollout.Paused)
	case 11:
		c.leads()
		c.tell("another controller leads")
	case 12:
		c.agentComesOrGoes(h)
	case 13:
		c.fails(h)
	case 14:
		c.floods, c.flooded = append(profiles, "")[c.random.IntN(6)], []int{1, 12}[c.random.IntN(2)]
		c.tell("a tenant floods with pods for %q that never start", c.floods)
	case 15:
		c.preempts(h)
	case 16:
		c.edits()
	default:
		c.seconds(20 * (1 + c.random.IntN(4)))
	}
	c.seconds(1 + c.random.IntN(12))
}

// come are pods that ask for one of these profiles each.
func (c *applied) come(profiles []string) {
	for range 1 + c.random.IntN(3) {
		c.waits(profiles[c.random.IntN(len(profiles))], int32(c.random.IntN(3)))
	}
}

func (c *applied) agentComesOrGoes(h *host) {
	h.AgentReady, h.AgentSince = !h.AgentReady && !h.off, c.Now
	c.tell("the agent of %s is there: %v", h.Name, h.AgentReady)
}

// seconds pass, with a step in each.
func (c *applied) seconds(many int) {
	for range many {
		c.step()
	}
}

// turnsOff is a machine that dies, or boots again. Its instances are made anew then.
func (c *applied) turnsOff(h *host) {
	if h.off {
		h.remember()
		c.returns(h)
		c.settle(h) // an agent reports only once it has done what it can
		c.booted[h.Name] = c.Now
		c.tell("%s boots", h.Name)
		return
	}
	c.faulty, c.died[h.Name] = true, h.isTainted()
	c.dies(h)
	c.tell("%s dies", h.Name)
}

// hasBooted reports whether a node had booted lately at a time: the scheduler may have chosen it for what it had before.
func (c *applied) hasBooted(h *host, at time.Time) bool {
	since := at.Sub(c.booted[h.Name])
	return since >= 0 && since < time.Minute
}

// deletes is a user who deletes the pod that has waited longest.
func (c *applied) deletes() {
	if len(c.waiting) > 0 {
		c.tell("pod %s/%s is deleted", c.waiting[0].Namespace, c.waiting[0].Name)
		c.waiting = c.waiting[1:]
	}
}

// fails lets what agents do to a node fail for a while, or no more.
func (c *applied) fails(h *host) {
	c.faulty = true
	if h.hardware.Fail != nil {
		h.hardware.Fail = nil
		c.tell("%s works again", h.Name)
		return
	}
	at := c.random.IntN(3)
	h.hardware.Fail = func(op sim.Op, _ string) error {
		if op != sim.OpCreateInstance && op != sim.OpDestroyInstance {
			return nil
		}
		if at--; at < 0 {
			return errors.New("the driver fails")
		}
		return nil
	}
	c.tell("%s fails", h.Name)
}

// played is a history: faults, then their end and that of the users, who must find what they ask for and leave the GPUs at rest.
func (c *applied) played(events int) {
	c.races = true
	for range events {
		if c.happens(); c.broken != "" {
			return
		}
		c.counts()
	}
	c.faultsEnd()
	c.leave()
	c.servesTheLast()
	c.leave()
	c.comesToRest()
	c.restores()
}

func (c *applied) faultsEnd() {
	c.tell("the faults end")
	c.races = false
	for i := range c.Policies {
		c.Policies[i].Spec.Rollout.Paused = false
		c.Policies[i].Generation++
	}
	for _, h := range c.hosts {
		if h.off {
			c.turnsOff(h)
		}
		h.AgentReady, h.hardware.Fail, h.driver.pulls = true, nil, 0
	}
}

// servesTheLast is a pod that asks for the largest profile that may be made. An edit that failed for good, its agent lost, people try again
// (416563); whatever else failed is the operator's to do again.
func (c *applied) servesTheLast() {
	for _, h := range c.hosts {
		if c.edited && h.GPU.Status.Rollout.Failed != nil {
			h.annotate(v1alpha1.AnnotationRetry, "1")
		}
	}
	of := c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand
	if len(of.Reserve) > 0 {
		return
	}
	c.waits(map[v1alpha1.MIGProfile]string{"1g": "1g.5gb", "2g": "2g.10gb", "3g": "3g.20gb", "7g": "7g.40gb"}[of.Profiles[len(of.Profiles)-1]], 0)
	c.waiting[len(c.waiting)-1].Spec.NodeSelector = nil
	for n := 0; n < 800 && c.users() > 0; n++ {
		c.steps(5 * time.Second)
	}
	c.breaks(c.users() > 0, "10: a pod waits for ever: %v", c.told[max(0, len(c.told)-30):])
	c.counts()
}

// comesToRest looks whether each GPU comes back to the layout of its policy, where it stays no longer than it is held if a pod waits that starts
// nowhere (200309).
func (c *applied) comesToRest() {
	rested := map[string]bool{}
	forPods := func(e v1alpha1.GPUDemand) bool { return e.FirstPod != "" }
	for range 400 {
		c.steps(10 * time.Second)
		for name, h := range c.hosts {
			rests := len(h.GPU.Status.Demand) == 0 || c.isReady() && !slices.ContainsFunc(h.GPU.Status.Demand, forPods)
			rested[name] = rested[name] || rests || len(c.of(h).Spec.Sharing.MIG.Layouts[0].OnDemand.Reserve) > 0
		}
		if done := c.isReady() && len(rested) == len(c.hosts); done && !slices.Contains(slices.Collect(maps.Values(rested)), false) {
			break
		}
	}
	c.breaks(len(c.waiting) == 0 && !c.isReady(), "progress: the policy is not Ready at the end")
	for _, h := range c.hosts {
		c.breaks(!rested[h.Name], "10: GPUs of %s do not rest: %v", h.Name, says(h.GPU.Status.Demand))
	}
	c.restores()
}

// restores deletes the policy, after which all is as it was.
func (c *applied) restores() {
	c.edited, c.Policies, c.floods = true, nil, ""
	of := func(d gpu.Device) bool { return d.State.MIG }
	for range 150 {
		c.steps(10 * time.Second)
		if !slices.ContainsFunc(slices.Collect(maps.Values(c.hosts)), func(h *host) bool { return slices.ContainsFunc(h.devices(), of) }) && c.leavesNothing() {
			return
		}
	}
	c.breaks(true, "progress: a GPU is not restored, or a DeviceClass or DeviceTaintRule is left")
}

// users is how many pods wait that can start.
func (c *applied) users() (n int) {
	for _, pod := range c.waiting {
		if pod.Namespace != flooding {
			n++
		}
	}
	return n
}

// leave ends all pods but those that never start.
func (c *applied) leave() {
	c.waiting, c.late = nil, nil
	for n := 0; n < 10 || len(c.bound) > 0; n++ {
		c.step()
	}
	for _, h := range c.hosts {
		for _, p := range slices.Clone(h.Pods) {
			if p.Namespace == "user" {
				c.end(h, p.Name)
			}
		}
	}
}

// counts notes whether a GPU has something else than at rest, for a pod.
func (c *applied) counts() {
	for _, h := range c.hosts {
		for _, e := range h.GPU.Status.Demand {
			good := h.GPU.Status.Rollout.LastGood
			if good != nil && e.FirstPod != "" && slices.ContainsFunc(good.Devices, func(d v1alpha1.DeviceSpec) bool {
				return d.UUID == e.UUID && reflect.DeepEqual(d.Sharing.Instances, e.Instances)
			}) {
				c.repartitioned++
			}
		}
	}
}

// TestHistoriesOfDemand plays random histories with MIG on demand. DEMAND_HISTORY=7 plays one; DEMAND_HISTORIES=10000 more, from seed
// DEMAND_HISTORIES_FROM on, until DEMAND_HISTORIES_BREAKS have failed; DEMAND_HISTORIES_OF_DRA and so on those of NVIDIA's DRA driver (2^40 more); HISTORIES_DIGEST=1 logs a digest of each.
func TestHistoriesOfDemand(t *testing.T) {
	var played, repartitioned atomic.Uint64
	stage := history.Stage{
		Prefix: "DEMAND_", Test: "./internal/engine/rollout -run TestHistoriesOfDemand$", Whole: true, Kinds: []string{"chance"},
		Of: func(seed uint64) history.History { return history.History{Seed: seed} },
		Play: func(h history.History, _ bool) (broken string, told []string) {
			c := newApplied(t, h.Seed)
			if c.broken == "" {
				c.played(40)
			}
			if played.Add(1); c.repartitioned > 0 {
				repartitioned.Add(1)
			}
			if os.Getenv("HISTORIES_DIGEST") != "" {
				t.Logf("history %d: %d repartitions, %d told, digest %x", h.Seed, c.repartitioned, len(c.told), sha256.Sum256([]byte(strings.Join(c.told, "\n"))))
			}
			told = c.told[:cmp.Or(c.until, len(c.told))]
			return c.broken, told[max(0, len(told)-60):]
		},
	}
	if stage.Replay(t) {
		return
	}
	for prefix, base := range map[string]uint64{"DEMAND_HISTORIES": 0, "DEMAND_HISTORIES_OF_DRA": onDriver} {
		study := history.NewStudy(t, prefix, 20, 20)
		study.Base, study.First = base, max(1, study.First)
		playAll(t, stage, study)
	}
	t.Logf("%d of %d histories have a repartition", repartitioned.Load(), played.Load())
	NewWithT(t).Expect(played.Load() < 20 || 10*repartitioned.Load() >= 3*played.Load()).To(BeTrue(), "too few histories have a repartition")
}

// largeOn is a miniature with nodes of one A100, at rest with two instances of 3g, of which 7g may be made.
func largeOn(t *testing.T, nodes ...string) *applied {
	t.Helper()
	return largeOf(t, []sim.Model{sim.A100}, nodes...)
}

func largeOf(t *testing.T, models []sim.Model, nodes ...string) *applied {
	t.Helper()
	return newApplied(t, 0).large(models, nodes...)
}

func (c *applied) large(models []sim.Model, nodes ...string) *applied {
	for _, name := range nodes {
		c.comes(name, models...)
	}
	c.setPolicy("research", v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{Fill: "3g", OnDemand: &v1alpha1.MIGOnDemand{
			Mode: v1alpha1.OnDemandModeApply, Profiles: []v1alpha1.MIGProfile{"3g", "7g"}, IdleSeconds: 30,
		}}},
	}}, evicting)
	for range 200 {
		c.step()
	}
	c.edited = false
	return c
}

// TestWhatAChangeForDemandWaitsFor, once it is decided: whose instance it could destroy.
func TestWhatAChangeForDemandWaitsFor(t *testing.T) {
	pod := func(c *applied, bound time.Duration) cluster.Pod {
		return cluster.Pod{
			Namespace: "user", Name: "p", UID: "p", Controller: "ReplicaSet", GPU: true, Scheduled: c.Now.Add(-bound), Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1},
		}
	}
	for name, is := range map[string]struct {
		before func(c *applied, h *host)
		during int // seconds
		taints bool
	}{
		"a pod that holds one":             {func(c *applied, h *host) { c.hold(h, "p", 0, h.devices()[0].State.Instances[0].ID) }, 60, false},
		"a pod bound to the node just now": {func(c *applied, h *host) { h.Pods = append(h.Pods, pod(c, 0)) }, 10, false},
		"a successor of one that has another": {func(c *applied, h *host) {
			c.hold(h, "p", 1, h.devices()[1].State.Instances[0].ID)
			h.succeeded(c.site, map[string]int64{"nvidia.com/mig-3g.20gb": 1})
		}, 10, false},
		"a pod that had one a moment ago": {func(c *applied, h *host) {
			c.lastHeld[h.devices()[0].State.Instances[0].UUID] = c.Now
			c.reportHeld(h, h.devices())
		}, 20, false},
		"a pod that the kubelet has not admitted for long":   {func(c *applied, h *host) { h.Pods = append(h.Pods, pod(c, time.Minute)) }, 60, false},
		"pods that a scheduler binds who saw no taint yet":   {func(*applied, *host) {}, 2, true},
		"a pod that was bound meanwhile, and is not evicted": {func(*applied, *host) {}, 5, true},
	} {
		t.Run(name, func(t *testing.T) {
			g, c := NewWithT(t), largeOf(t, []sim.Model{sim.A100, sim.A100}, "n0")
			h := c.hosts["n0"]
			is.before(c, h)
			h.GPU.Status.Demand = []v1alpha1.GPUDemand{{UUID: h.devices()[0].UUID, Instances: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}, FirstPod: "user/w", SinceTime: metav1.NewTime(c.Now)}}
			c.version["n0"]++
			for range 100 {
				if c.acts(); !is.taints || h.HasChangingTaint() {
					break
				}
			}
			if name == "a pod that was bound meanwhile, and is not evicted" {
				c.hold(h, "p", 0, h.devices()[0].State.Instances[0].ID)
				c.version["n0"]++
			}
			for range is.during {
				if !is.taints {
					g.Expect(h.Taints).To(BeEmpty())
				}
				c.passes(time.Second)
				c.acts()
			}
			g.Expect(c.broken).To(BeEmpty())
			g.Expect(h.devices()[0].State.Instances).To(HaveEach(HaveField("Profile", "3g.20gb")))
		})
	}
}

// TestANodeThatDiesInTheMiddle of a change for a pod: another serves the pod once Kubernetes has found that out, and not when the time of the change is over.
func TestANodeThatDiesInTheMiddle(t *testing.T) {
	for _, after := range []int{0, 2, 4} {
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			g, c := NewWithT(t), largeOn(t, "n0", "n1")
			c.waits("7g.40gb", 0)
			for !c.hosts["n0"].HasChangingTaint() {
				c.step()
			}
			for range after {
				c.step()
			}
			c.turnsOff(c.hosts["n0"])
			c.waiting = nil
			c.waits("7g.40gb", 0)
			for range 120 {
				c.step()
			}
			g.Expect(c.users()).To(BeZero(), strings.Join(c.told, "\n"))
			g.Expect(c.hosts["n0"].HasChangingTaint()).To(BeTrue(), "it takes no pods before the change has ended")
			c.turnsOff(c.hosts["n0"])
			for range 200 {
				c.step()
			}
			g.Expect(c.hosts["n0"].Taints).To(BeEmpty())
			g.Expect(c.broken).To(BeEmpty())
		})
	}
}

// TestAPodThatNeverStartsWhileControllersRestart causes hardly more changes than beside one controller that remembers its attempts.
func TestAPodThatNeverStartsWhileControllersRestart(t *testing.T) {
	changes := func(every int) (changes int) {
		c := largeOn(t, "n0")
		h := c.hosts["n0"]
		c.waits("7g.40gb", 0)
		c.waiting[0].Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "lost"}}}}
		was := h.GPU.Spec.Devices[0].Sharing.Instances
		for second := 1; second <= 6*3600; second += 5 {
			if every > 0 && second/5%(every*12) == 0 {
				c.leads()
			}
			if c.steps(5 * time.Second); !reflect.DeepEqual(h.GPU.Spec.Devices[0].Sharing.Instances, was) {
				was, changes = h.GPU.Spec.Devices[0].Sharing.Instances, changes+1
			}
		}
		NewWithT(t).Expect(c.broken).To(BeEmpty())
		return changes
	}
	of := changes(0)
	for _, minutes := range []int{2, 3, 5, 7, 15, 40} {
		many := changes(minutes)
		t.Logf("controllers that lead for %d minutes each: %d changes in 6 hours, %d beside one", minutes, many, of)
		NewWithT(t).Expect(many).To(BeNumerically("<=", of+4))
	}
}
