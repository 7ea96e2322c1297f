// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// TestRandomisedRollouts lets controllers decide on snapshots of which any object may be out of date, end in the middle
// of their actions and be followed by others, and find agents gone, nodes replaced and users coming and going, while
// the policy is edited, deleted and written anew. Whatever happens: no more nodes than the budget allows are disturbed,
// no node loses what a pod uses, NVIDIA's config-manager never meets a key that it cannot see; and once the faults end
// everything is in the desired state, or as it was before. GPUSHARING_SEEDS=5000 plays so many seeds (make rollouts).
func TestRandomisedRollouts(t *testing.T) {
	for seed := range seeds(t, 40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			s := newSimulation(t, seed)
			for range 80 {
				s.fault()
				s.reconcile()
				NewWithT(t).Expect(s.exceeded).To(BeEmpty())
			}
			s.calm()
		})
	}
}

// TestTheBudgetNeedsTheOwnWrites: were a reconcile to begin before the cache shows what the last one wrote, the same
// slot would be given away twice. So the simulation above would see it.
func TestTheBudgetNeedsTheOwnWrites(t *testing.T) {
	for seed := range seeds(t, 400) {
		s := newSimulation(t, seed)
		s.cache.forgets = true
		for range 80 {
			s.fault()
			s.act(rollout.Decide)
			if s.exceeded != "" {
				t.Log(seed, s.exceeded)
				return
			}
		}
	}
	t.Error("no budget was exceeded")
}

// seeds are that many, or as many as GPUSHARING_SEEDS says.
func seeds(t *testing.T, usual uint64) uint64 {
	t.Helper()
	asked := os.Getenv("GPUSHARING_SEEDS")
	if asked == "" {
		return usual
	}
	n, err := strconv.ParseUint(asked, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

type simulation struct {
	*site
	t        *testing.T
	random   *rand.Rand
	budget   int
	fresh    int // of so many objects one is read late
	cache    cached
	exceeded string // how the budget was, if it was
}

// cached is what the controller knows: of each object what it was at some time, no earlier than when the controller
// last wrote it. What others write, it may learn at any time later, of one object before another.
type cached struct {
	nodes    map[string]cluster.Node // labels, annotations, taints and what is advertised
	gpus     map[string]v1alpha1.GPUNode
	pods     map[string]cluster.Node // the pods on the node, and whether its agent is Ready
	features map[string]cluster.NodeFeatures
	version  map[string]int // of each Node
	policies []v1alpha1.GPUSharingPolicy
	forgets  bool // it may lack even what the controller wrote itself: what must not be
}

func newSimulation(t *testing.T, seed uint64) *simulation {
	t.Helper()
	s := &simulation{site: newSite(), t: t, random: rand.New(rand.NewPCG(seed, 0))}
	s.Plugin.NodeFeatures = s.random.IntN(3) > 0
	if s.random.IntN(3) == 0 {
		s.byHand = mpsByHand(3)
	}
	for i := range 5 {
		s.host(fmt.Sprintf("n%d", i))
	}
	s.budget = 1 + s.random.IntN(3)
	s.fresh = 2 + s.random.IntN(2)
	s.edit()
	s.lead()
	return s
}

func (s *simulation) host(name string) {
	h := s.add(name, []sim.Model{sim.A100, sim.H100}[s.random.IntN(2)], sim.A100)
	h.Labels[v1alpha1.LabelMIGManager], h.Labels[nvidia.LabelPresent] = "true", "true"
	if s.random.IntN(3) == 0 {
		h.virtual()
	}
	h.watches, h.plugin.slow = s.random.IntN(2) == 0, time.Duration(s.random.IntN(5))*time.Second
}

// lead lets a new controller lead, which waits until its cache shows what the last one wrote.
func (s *simulation) lead() {
	s.cache = cached{
		nodes: map[string]cluster.Node{}, gpus: map[string]v1alpha1.GPUNode{}, pods: map[string]cluster.Node{},
		features: map[string]cluster.NodeFeatures{}, version: map[string]int{}, forgets: s.cache.forgets,
	}
	s.read(func() bool { return true })
}

// read brings some objects of the cache up to date.
func (s *simulation) read(some func() bool) {
	c := &s.cache
	for _, name := range slices.Sorted(maps.Keys(s.hosts)) {
		h := s.hosts[name]
		n, known := c.nodes[name]
		n = h.copiedUnless(n)
		if some() || !known {
			c.nodes[name], c.version[name] = n, s.version[name]
		}
		if was := c.gpus[name]; (some() || !known) && !equal(&was, &h.GPU) {
			c.gpus[name] = *h.GPU.DeepCopy()
		}
		if some() || !known {
			c.pods[name] = n
		}
		if some() || !known {
			c.features[name] = n.Features
		}
	}
	maps.DeleteFunc(c.nodes, func(name string, _ cluster.Node) bool { return s.hosts[name] == nil })
	if some() {
		c.policies = nil
		for i := range s.Policies {
			c.policies = append(c.policies, *s.Policies[i].DeepCopy())
		}
	}
}

// wrote shows the cache an object as the controller has just written it.
func (s *simulation) wrote(a action.Action) {
	h := s.hosts[a.NodeName()]
	if h == nil || s.cache.forgets {
		return
	}
	switch a.(type) {
	case action.PatchNode, action.Taint, action.Untaint, action.TaintDevices, action.UntaintDevices:
		s.cache.nodes[h.Name], s.cache.version[h.Name] = h.alone(), s.version[h.Name]
	case action.AllowMPS:
		f := s.cache.features[h.Name]
		f.OverriddenSince = time.Time{}
		s.cache.features[h.Name] = f
	case action.SetSpec:
		s.cache.gpus[h.Name] = *h.GPU.DeepCopy()
	}
}

// known is the snapshot as the cache has it.
func (s *simulation) known() cluster.Snapshot {
	snapshot := s.withoutNodes()
	snapshot.Policies = s.cache.policies
	for _, name := range slices.Sorted(maps.Keys(s.cache.nodes)) {
		n := s.cache.nodes[name]
		n.Pods, n.AgentReady, n.AgentSince = s.cache.pods[name].Pods, s.cache.pods[name].AgentReady, s.cache.pods[name].AgentSince
		n.Features = s.cache.features[name]
		if h := s.hosts[name]; h == nil || !h.withoutGPUNode {
			n.GPU = s.cache.gpus[name]
			snapshot.Nodes = append(snapshot.Nodes, s.reads.joined(n)) // as NodeOf joins a Node and its GPUNode
		} else if n.Annotations[v1alpha1.AnnotationBaseline] != "" {
			n = n.WithCopy(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}})
			n.NoGPUNode = true
			snapshot.Nodes = append(snapshot.Nodes, n)
		}
	}
	return snapshot
}

// edit writes a policy of some strategy.
func (s *simulation) edit() {
	sharings := []v1alpha1.Sharing{
		{Strategy: v1alpha1.StrategyExclusive},
		timeSlicing(2), timeSlicing(4), mps(4), mps(10),
		mig(count("1g", 7)), mig(count("3g", 1), count("1g", 2)), mig(count("2g", 3)),
	}
	modes := []v1alpha1.DrainMode{v1alpha1.DrainModeEvict, v1alpha1.DrainModeWaitForIdle, v1alpha1.DrainModeNever}
	p := policyOf("research", sharings[s.random.IntN(len(sharings))], func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Rollout.MaxUnavailable = new(intstr.FromInt32(int32(s.budget)))
		p.Spec.Rollout.Drain.Mode = modes[s.random.IntN(len(modes))]
		p.Spec.Rollout.FailureThreshold = 5
		p.Spec.Rollout.Reboot = v1alpha1.RebootModeIfRequired
	})
	if len(s.Policies) > 0 {
		p.Generation = s.Policies[0].Generation + 1
	}
	s.Policies = []v1alpha1.GPUSharingPolicy{p}
}

// fault makes something happen that nobody asked for.
func (s *simulation) fault() {
	h := s.hosts[fmt.Sprintf("n%d", s.random.IntN(5))]
	switch s.random.IntN(22) {
	case 0, 1:
		s.rethink()
	case 2:
		if h.down.IsZero() {
			h.AgentReady, h.AgentSince = !h.AgentReady, s.Now // before it reports
		}
	case 3, 4:
		s.place(h)
	case 5, 6, 7:
		s.leave(h)
	case 8:
		if s.random.IntN(8) == 0 {
			s.replace(h)
		}
	case 9:
		if !h.upgrade.goesOn() {
			h.begins(upgrade{restart: s.random.IntN(2) == 0, builds: time.Duration(s.random.IntN(20)) * time.Second})
			s.version[h.Name]++
		}
	case 10:
		s.optInOrOut(h)
	case 11:
		s.lead()
	case 12:
		s.destroy(h)
	}
}

// destroy takes an idle instance away.
func (s *simulation) destroy(h *host) {
	for i, d := range h.devices() {
		if d.State.MIG && len(d.State.Instances) > 0 && len(d.Holders) == 0 {
			h.destroy(i)
			return
		}
	}
}

// rethink edits the policy, deletes it or writes it anew.
func (s *simulation) rethink() {
	switch {
	case len(s.Policies) == 0 || s.random.IntN(8) == 0:
		s.edit()
	case s.random.IntN(11) == 0:
		s.Policies = nil
	}
}

// leave ends a pod of a user.
func (s *simulation) leave(h *host) {
	for _, p := range h.Pods {
		if p.Namespace == "user" {
			s.end(h, p.Name)
			return
		}
	}
}

// optInOrOut takes NVIDIA's programs off a node by the label for that, or lets them back.
func (s *simulation) optInOrOut(h *host) {
	s.version[h.Name]++
	if h.Labels[optOutLabel] == "" {
		h.Labels[optOutLabel] = "false"
		return
	}
	delete(h.Labels, optOutLabel)
	nvidia.LabelForClusterPolicy(h.Labels, true, "")
}

// keepOff removes the deploy labels of the nodes that have opted out.
func (s *simulation) keepOff() {
	for _, h := range s.hosts {
		if h.Labels[optOutLabel] != "" {
			s.version[h.Name]++
			nvidia.LabelForClusterPolicy(h.Labels, true, "")
		}
	}
}

// replace deletes a node with all that is on it, and registers it anew.
func (s *simulation) replace(h *host) {
	version := s.version[h.Name]
	s.host(h.Name)
	s.version[h.Name] = version + 1
	delete(s.cache.nodes, h.Name)
}

// place lets the scheduler bring a pod to a node that is not tainted and advertises something.
func (s *simulation) place(h *host) {
	if len(h.Taints) > 0 || len(advertised(h)) == 0 || h.upgrade.goesOn() {
		return
	}
	s.pods++
	devices := h.devices()
	index := s.random.IntN(len(devices))
	instance := gpu.WholeGPU
	if d := devices[index]; d.State.MIG {
		if len(d.State.Instances) == 0 {
			return
		}
		instance = d.State.Instances[s.random.IntN(len(d.State.Instances))].ID
	}
	s.hold(h, fmt.Sprintf("user-%d", s.pods), index, instance)
}

// reconcile decides on a snapshot that may be out of date, and may end in the middle of what follows.
func (s *simulation) reconcile() {
	before := s.users()
	s.act(s.memory.decide)
	s.check(before)
}

func (s *simulation) act(decide func(cluster.Snapshot) rollout.Decision) {
	s.read(func() bool { return s.random.IntN(s.fresh) > 0 })
	for _, a := range decide(s.known()).Actions {
		if s.random.IntN(10) == 0 {
			continue
		}
		if p := a.For(); p.Name != "" && (len(s.Policies) == 0 || s.Policies[0].Generation != p.Generation) {
			continue // the executor has asked the API server whether the policy is still so
		}
		if locked(a) && s.cache.version[a.NodeName()] != s.version[a.NodeName()] {
			continue // the API server has refused it
		}
		s.do(a)
		s.wrote(a)
		s.withinBudget(a)
	}
	s.keepOff()
	s.tick(time.Duration(1+s.random.IntN(3)) * time.Second)
}

// locked reports whether the API server refuses an action when the Node has changed since it was read.
func locked(a action.Action) bool {
	switch a := a.(type) {
	case action.Taint, action.Untaint, action.KeepTaints:
		return true
	case action.PatchNode:
		return a.Locked
	}
	return false
}

// users are the holders of instances with the UUIDs of what they hold.
func (s *simulation) users() map[string]string {
	users := map[string]string{}
	for _, h := range s.hosts {
		for _, d := range h.devices() {
			for _, o := range d.Holders {
				users[o.Pod] = d.UUID
				for _, i := range d.State.Instances {
					if i.ID == o.Instance {
						users[o.Pod] = i.UUID
					}
				}
			}
		}
	}
	return users
}

func (s *simulation) check(before map[string]string) {
	s.t.Helper()
	g := NewWithT(s.t)
	g.Expect(s.crashes).To(BeEmpty())
	g.Expect(s.killed).To(BeEmpty())
	g.Expect(s.beside).To(BeEmpty())
	for pod, what := range s.users() {
		if was, known := before[pod]; known {
			g.Expect(what).To(Equal(was), "what pod %s holds was taken away from it", pod)
		}
	}
}

// withinBudget counts the nodes that are disturbed after an action.
func (s *simulation) withinBudget(a action.Action) {
	disturbed := 0
	for _, h := range s.hosts {
		stopped := strings.HasPrefix(h.Labels[pluginLabel], cluster.StoppedValue)
		if !h.upgrade.goesOn() && (len(h.Taints) > 0 || stopped && !h.protected()) {
			disturbed++
		}
	}
	if disturbed > s.budget {
		s.exceeded = fmt.Sprintf("%d nodes are disturbed, and the budget is %d: %s", disturbed, s.budget, a)
	}
}

// protected reports whether a driver upgrade has taken the MIG instances of the node, as far as its agent has reported:
// to keep NVIDIA's device plugin from what is left needs no slot, since the upgrade had none either.
func (h *host) protected() bool {
	at, interrupted := timing.Stamped(h.Annotations[v1alpha1.AnnotationInterrupted], "maintenance")
	applied, _ := condition.Find(h.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	return interrupted && (!h.GPU.Spec.ChangeTime.After(at) || applied.ObservedGeneration < h.GPU.Generation)
}

// calm ends the faults and the users, and looks what becomes of it.
func (s *simulation) calm() {
	s.t.Helper()
	g := NewWithT(s.t)
	for _, h := range s.hosts {
		if h.Labels[optOutLabel] != "" {
			s.optInOrOut(h)
		}
		if ready := h.down.IsZero(); ready != h.AgentReady {
			h.AgentReady, h.AgentSince = ready, s.Now
		}
		for _, p := range slices.Clone(h.Pods) {
			if p.Namespace == "user" {
				s.end(h, p.Name)
			}
		}
	}
	s.tick(30 * time.Second)
	d, _ := s.run(600)
	g.Expect(d.Actions).To(BeEmpty(), "%v", d.Nodes)
	g.Expect(s.crashes).To(BeEmpty())
	for _, n := range d.Nodes {
		g.Expect(n.State).To(Equal(node.UpToDate), "%+v", n)
		if n.Policy != "" {
			g.Expect(advertised(s.hosts[n.Node])).To(Equal(n.Expected), n.Node)
		}
	}
	for _, h := range s.hosts {
		g.Expect(h.Taints).To(BeEmpty())
		g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
		g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
		g.Expect(h.plugin.uuids).To(ConsistOf(h.instances()), h.Name)
		g.Expect(h.features.ours.IsZero()).To(Equal(len(h.daemons) == 0 || !s.Plugin.NodeFeatures), "%s: %v", h.Name, h.features)
	}
	if len(s.Policies) == 0 {
		g.Expect(d.Nodes).To(BeEmpty())
		g.Expect(d.ConfigurePlugin).To(BeFalse())
	}
}
