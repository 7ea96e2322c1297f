// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// TestRandomisedRollouts lets controllers decide on worlds that are out of date, end in the middle of their actions, and
// find agents gone and users coming and going, while the policy is edited, deleted and written anew. Whatever happens: no
// more nodes than the budget allows are disturbed, no node loses what somebody uses, NVIDIA's config-manager never meets a
// key that it cannot see; and once the faults end everything is as the policy asks, or as it was before.
func TestRandomisedRollouts(t *testing.T) {
	seeds := 40
	if testing.Short() {
		seeds = 20
	}
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newSimulation(t, seed)
			for range 80 {
				s.fault()
				s.pass()
			}
			s.calm()
		})
	}
}

type simulation struct {
	*cluster
	t      *testing.T
	random *rand.Rand
	budget int
	stale  []reading // older ones, newest last
}

// reading is the world as a pass may read it, late, with the version that each Node had.
type reading struct {
	rollout.World
	version map[string]int
}

func newSimulation(t *testing.T, seed uint64) *simulation {
	t.Helper()
	s := &simulation{cluster: newCluster(), t: t, random: rand.New(rand.NewPCG(seed, 0))}
	for i := range 5 {
		h := s.add(fmt.Sprintf("n%d", i), []sim.Model{sim.A100, sim.H100}[s.random.IntN(2)], sim.A100)
		h.Labels[v1alpha1.LabelMIGManager] = "true"
	}
	s.Wiring.NVIDIAMPS = s.random.IntN(3) == 0
	s.budget = 1 + s.random.IntN(3)
	s.edit()
	return s
}

// edit writes a policy of some strategy.
func (s *simulation) edit() {
	sharings := []v1alpha1.Sharing{
		{Strategy: v1alpha1.StrategyExclusive},
		timeSlicing(2), timeSlicing(4), mps(4), mps(10),
		mig(count("1g", 7)), mig(count("3g", 1), count("1g", 2)), mig(count("2g", 3)),
	}
	modes := []v1alpha1.EvictionMode{v1alpha1.EvictionModeEvict, v1alpha1.EvictionModeWaitForIdle, v1alpha1.EvictionModeNever}
	p := policyOf("research", sharings[s.random.IntN(len(sharings))], func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Rollout.MaxUnavailable = new(intstr.FromInt32(int32(s.budget)))
		p.Spec.Rollout.Eviction.Mode = modes[s.random.IntN(len(modes))]
		p.Spec.Rollout.MaxFailures = 5
	})
	if len(s.Policies) > 0 {
		p.Generation = s.Policies[0].Generation + 1
	}
	s.Policies = []v1alpha1.GPUSharingPolicy{p}
}

// fault makes something happen that nobody asked for.
func (s *simulation) fault() {
	h := s.hosts[fmt.Sprintf("n%d", s.random.IntN(5))]
	kind := s.random.IntN(20)
	if kind < 8 {
		s.stale = nil // what is read late are our own writes: what others do is what wakes a pass
	}
	switch kind {
	case 0:
		if s.random.IntN(4) == 0 {
			s.edit()
		}
	case 1:
		if s.random.IntN(6) == 0 {
			s.Policies = nil
		} else if len(s.Policies) == 0 {
			s.edit()
		}
	case 2:
		h.AgentReady = !h.AgentReady
	case 3, 4:
		s.place(h)
	case 5, 6, 7:
		for _, p := range h.Pods {
			if p.Namespace == "user" {
				s.end(h, p.Name)
				return
			}
		}
	}
}

// place lets the scheduler bring a pod to a node that is not tainted and advertises something.
func (s *simulation) place(h *host) {
	if len(h.Taints) > 0 || len(advertised(h)) == 0 {
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

// pass decides on a world that may be out of date, and may end in the middle of what follows.
func (s *simulation) pass() {
	s.stale = append(s.stale, reading{s.world(), maps.Clone(s.version)})
	s.stale = s.stale[max(0, len(s.stale)-3):]
	w := s.stale[len(s.stale)-1]
	if s.random.IntN(4) == 0 {
		w = s.stale[0]
		w.Now = s.Now
	}
	before := s.users()
	for _, a := range rollout.Decide(w.World).Actions {
		if s.random.IntN(10) == 0 {
			continue
		}
		if p := a.For(); p.Name != "" && (len(s.Policies) == 0 || s.Policies[0].Generation != p.Generation) {
			continue // the executor has asked the API server whether the policy is still so
		}
		if locked(a) && w.version[a.Target()] != s.version[a.Target()] {
			continue // the API server has refused it
		}
		s.do(a)
	}
	s.tick(time.Duration(1+s.random.IntN(3)) * time.Second)
	s.check(before)
}

// locked says whether the API server refuses an action when the Node has changed since it was read.
func locked(a rollout.Action) bool {
	switch a := a.(type) {
	case rollout.Taint, rollout.Untaint:
		return true
	case rollout.PatchNode:
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
	for pod, what := range s.users() {
		if was, known := before[pod]; known {
			g.Expect(what).To(Equal(was), "what pod %s holds was taken away from it", pod)
		}
	}
	disturbed := 0
	for _, h := range s.hosts {
		if len(h.Taints) > 0 || h.Labels[pluginLabel] != "true" {
			disturbed++
		}
	}
	g.Expect(disturbed).To(BeNumerically("<=", s.budget))
}

// calm ends the faults and the users, and looks what becomes of it.
func (s *simulation) calm() {
	s.t.Helper()
	g := NewWithT(s.t)
	for _, h := range s.hosts {
		h.AgentReady = true
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
		g.Expect(n.State).To(Equal(rollout.StateUpToDate), "%+v", n)
		if n.Policy != "" {
			g.Expect(advertised(s.hosts[n.Node])).To(Equal(n.Expected), n.Node)
		}
	}
	for _, h := range s.hosts {
		g.Expect(h.Taints).To(BeEmpty())
		g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
		g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationPaused))
	}
	if len(s.Policies) == 0 {
		g.Expect(d.Nodes).To(BeEmpty())
		g.Expect(d.Wire).To(BeFalse())
	}
}
