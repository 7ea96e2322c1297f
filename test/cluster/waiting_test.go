// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
	"github.com/gpusharing/gpu-sharing-operator/test/invariant"
)

// waiting is what histories of late seeds have of MIG on demand: pods that wait, the scheduler that places them, and the demand controller. Of a node
// that was UpToDate and to which nothing has happened since, changes are for demand. Such a change
//
//	evicts no pod and changes no MIG mode; what it destroys no container has (takes)
//	has the kubelet refuse no pod, and give none an instance that is gone, but those that tolerate its taint
//
// and at rest no pod waits for what can be made.
type waiting struct {
	random   *rand.Rand
	asks     chan struct{} // the demand controller to look
	reviewed atomic.Int64  // by it
	pods     map[string]*waits
	late     []string        // pods that the scheduler has chosen a node for and not bound
	calm     map[string]calm // nodes; guarded by facts
	were     map[string]calm // before the event
}

// waits is a pod that comes without a node.
type waits struct {
	kind   string    // "never" is bound once the faults have ended, "brief" ends soon, "tolerant" tolerates everything
	node   string    // that the scheduler has chosen
	chosen time.Time // when it saw the node
}

// calm is for how many rounds a node was UpToDate since something happened, and when the last of them was: changes are for demand after calms rounds.
type calm struct {
	rounds int
	since  time.Time
}

const calms = 3

// reviews lets the demand controller look once in each round. It gathers events for 2 s of real time, in which hours pass here.
func (s *run) reviews(c *demand.Controller, mgr manager.Manager) error {
	return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-s.waiting.asks:
				_, _ = c.Reconcile(ctx, demand.Request{}) // what fails is tried again in the next round
				s.waiting.reviewed.Add(1)
			}
		}
	}))
}

// review asks the demand controller to look, and returns whether it has.
func (s *run) review() (answered func() bool) {
	before := s.waiting.reviewed.Load()
	select {
	case s.waiting.asks <- struct{}{}:
	default: // it has not begun yet
	}
	return func() bool { return s.demands == nil || s.waiting.reviewed.Load() > before }
}

// someMIG is a machine with MIG, if there is one.
func (s *run) someMIG(random *rand.Rand) *place {
	with := slices.DeleteFunc(s.Machines(), func(p *place) bool { return !p.devices()[0].MIGCapable })
	return history.Pick(random, append(with, s.Machines()[0])[:max(1, len(with))]...)
}

// onDemandEvent gives the policy of a node MIG on demand, or makes one, and has pods wait for it.
func (s *run) onDemandEvent(random *rand.Rand) {
	type profiles = []v1alpha1.MIGProfile
	of := &v1alpha1.MIGOnDemand{
		Mode: v1alpha1.OnDemandModeApply, IdleSeconds: history.Pick[int32](random, 30, 60),
		Profiles: history.Pick(random, profiles{"1g", "2g", "3g"}, profiles{"1g", "3g", "7g"}, profiles{"2g", "3g"}),
	}
	if random.IntN(4) == 0 {
		of.Reserve = []v1alpha1.MIGReserve{{Profile: of.Profiles[0], Count: 1}}
	}
	fill := history.Pick[v1alpha1.MIGProfile](random, "1g", "1g", "2g")
	at, p := s.someMIG(random), history.Policy("all", "", random)
	by := policy.Rank(s.ListPolicies()).Govern(policy.Node{Name: at.name, Labels: at.labels}).By
	if by != nil {
		p = *by
	}
	p.Spec.Sharing = v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{Fill: fill, OnDemand: of}},
	}}
	p.Spec.Rollout.Paused, p.Spec.GPUSelector = false, nil
	if s.UpdatePolicy(&p); by == nil {
		s.ReplacePolicies([]v1alpha1.GPUSharingPolicy{p})
	}
	s.Tell("policy %s lets MIG instances be made of %s: %+v", p.Name, fill, *of)
	s.waitEvent(random)
	s.disturbed()
}

// waitEvent has pods come without a node that ask for a MIG instance each. That disturbs no node.
func (s *run) waitEvent(random *rand.Rand) {
	s.areCalm(s.waiting.were)
	d := s.someMIG(random).devices()[0]
	for range 2 + random.IntN(3) {
		kind := history.Pick(random, "replica", "replica", "brief", "brief", "never", "tolerant")
		profile, err := mig.Resolve(d, history.Pick(random, "1g", "1g", "2g", "3g", "3g", "7g"))
		if err != nil { // it has none
			return
		}
		s.serial++
		pod := podOf(kind, fmt.Sprintf("%s-%d", kind, s.serial), "")
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(plan.ResourceOf(profile.Name)): one}
		s.Expect(s.sim.Create(s.t.Context(), pod)).To(Succeed())
		s.waiting.pods[pod.Name] = &waits{kind: kind}
		s.Tell("pod %s waits for %s", pod.Name, profile.Name)
	}
}

// schedule is a turn of the scheduler, and of the users whose pods it has bound.
func (s *run) schedule() {
	if len(s.waiting.pods) == 0 {
		return
	}
	list := &corev1.PodList{}
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	for i := range list.Items {
		pod := &list.Items[i]
		w := s.waiting.pods[pod.Name]
		switch {
		case w == nil || pod.Namespace != users || slices.Contains(s.waiting.late, pod.Name):
		case pod.Spec.NodeName != "":
			s.aged(pod, w)
		case w.kind == "never":
			s.scheduled(pod, corev1.ConditionFalse)
		default:
			s.choose(pod, w, list.Items)
		}
	}
}

// choose chooses a node that offers a pod what it asks for, and may bind it late.
func (s *run) choose(pod *corev1.Pod, w *waits, all []corev1.Pod) {
	at := slices.IndexFunc(s.Machines(), func(p *place) bool {
		n := &corev1.Node{}
		if s.client.Get(s.t.Context(), types.NamespacedName{Name: p.name}, n) != nil || keptOff(pod, n.Spec.Taints) {
			return false
		}
		remaining := offered(n)[askedBy(pod)]
		for i := range all {
			o := &all[i]
			chosen := slices.Contains(s.waiting.late, o.Name) && s.waiting.pods[o.Name].node == p.name
			if (o.Spec.NodeName == p.name || chosen) && askedBy(o) == askedBy(pod) && !cluster.Finished(o) {
				remaining--
			}
		}
		return remaining > 0
	})
	if at < 0 {
		s.scheduled(pod, corev1.ConditionFalse)
		return
	}
	w.node, w.chosen = s.Machines()[at].name, s.clock.Now()
	pod.Spec.NodeName = w.node
	if s.waiting.late = append(s.waiting.late, pod.Name); history.Maybe(s.waiting.random) {
		s.bind(pod.Name)
	}
	s.written.Add(1) // time goes on by a moment
}

func keptOff(pod *corev1.Pod, taints []corev1.Taint) bool {
	return slices.ContainsFunc(taints, func(t corev1.Taint) bool {
		return t.Effect != corev1.TaintEffectPreferNoSchedule && !clusterpolicy.Tolerates(pod.Spec.Tolerations, t)
	})
}

// askedBy is the resource that a pod asks for; empty: none.
func askedBy(pod *corev1.Pod) string {
	for name := range pod.Spec.Containers[0].Resources.Limits {
		return string(name)
	}
	return ""
}

// scheduled says of a pod whether it has a node.
func (s *run) scheduled(pod *corev1.Pod, is corev1.ConditionStatus) {
	s.t.Helper()
	if cluster.Scheduled(pod).Status == is {
		return
	}
	base := pod.DeepCopy()
	c := corev1.PodCondition{Type: corev1.PodScheduled, Status: is, LastTransitionTime: metav1.NewTime(s.clock.Now())}
	if is == corev1.ConditionFalse {
		c.Reason = corev1.PodReasonUnschedulable
	}
	pod.Status.Conditions = []corev1.PodCondition{c}
	s.Expect(client.IgnoreNotFound(s.sim.Status().Patch(s.t.Context(), pod, client.MergeFrom(base)))).To(Succeed())
}

// bind binds a pod to the node that was chosen for it, unless that was longer ago than a scheduler takes.
func (s *run) bind(name string) {
	s.t.Helper()
	at := slices.Index(s.waiting.late, name)
	if at < 0 {
		return
	}
	s.waiting.late = slices.Delete(s.waiting.late, at, at+1)
	w, pod := s.waiting.pods[name], &corev1.Pod{}
	err := s.client.Get(s.t.Context(), types.NamespacedName{Namespace: users, Name: name}, pod)
	late := s.clock.Since(w.chosen)
	if s.Expect(client.IgnoreNotFound(err)).To(Succeed()); err != nil || late > timing.ClaimsSettle {
		return
	}
	s.facts.Lock()
	s.kinds[name], s.homes[name] = "waits", w.node
	s.facts.Unlock()
	s.scheduled(pod, corev1.ConditionTrue) // the API server would write its own time, by which this was long ago
	s.Expect(s.sim.SubResource("binding").Create(s.t.Context(), pod, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: w.node}})).To(Succeed())
	s.Tell("pod %s is bound to %s, %s late", name, w.node, late.Round(time.Second/10))
}

// aged looks at a pod that has a node: the kubelet must not have refused it. A brief one ends.
func (s *run) aged(pod *corev1.Pod, w *waits) {
	since, calm := s.isCalm(w.node)
	ours := calm && !w.chosen.Before(since) && w.kind != "tolerant"
	p := s.places[w.node]
	for _, id := range p.node.Allocations()[users+"/"+pod.Name] {
		if ours && p.gpuOf(id) == "" {
			s.Breaks("demand", "pod %s is given %s of %s, which is gone", pod.Name, id, p.name)
		}
	}
	switch {
	case pod.Status.Phase == corev1.PodFailed:
		if ours {
			s.Breaks("demand", "the kubelet of %s refuses pod %s: %s", w.node, pod.Name, pod.Status.Message)
		}
	case w.kind != "brief" || pod.Status.Phase != corev1.PodRunning || s.waiting.random.IntN(6) > 0:
		return
	}
	s.Tell("pod %s ends, %s %s", pod.Name, pod.Status.Phase, pod.Status.Message)
	s.ended(pod.Name)
	s.written.Add(1)
}

// disturbed: what nodes do now has other causes than demand.
func (s *run) disturbed() { s.areCalm(map[string]calm{}) }

func (s *run) areCalm(nodes map[string]calm) {
	s.facts.Lock()
	defer s.facts.Unlock()
	s.waiting.calm = nodes
}

func (s *run) isCalm(node string) (since time.Time, is bool) {
	s.facts.RLock()
	defer s.facts.RUnlock()
	c := s.waiting.calm[node]
	return c.since, c.rounds == calms
}

// noteCalm notes which nodes are UpToDate, with all policies as they are.
func (s *run) noteCalm() {
	if s.demands == nil || s.fighting.Load() {
		s.disturbed()
		return
	}
	policies, gpuNodes, nodes := s.ListPolicies(), &v1alpha1.GPUNodeList{}, &corev1.NodeList{}
	if slices.ContainsFunc(policies, func(p v1alpha1.GPUSharingPolicy) bool { return p.Status.ObservedGeneration != p.Generation }) {
		return
	}
	s.Expect(errors.Join(s.client.List(s.t.Context(), gpuNodes), s.client.List(s.t.Context(), nodes))).To(Succeed())
	s.facts.Lock()
	defer s.facts.Unlock()
	for i := range gpuNodes.Items {
		n := &gpuNodes.Items[i]
		p := s.places[n.Name]
		is := s.waiting.calm[n.Name]
		if is.rounds == calms {
			continue
		}
		if p == nil || p.off || p.down.Load() || p.deaf.Load() || p.hardware.Fail != nil || n.Status.Rollout.State != string(node.UpToDate) || underway(n) ||
			!slices.ContainsFunc(nodes.Items, func(o corev1.Node) bool { return o.Name == n.Name && isReached(cluster.NodeOf(&o, n), policies) }) {
			is.rounds = -1
		}
		s.waiting.calm[n.Name] = calm{is.rounds + 1, s.clock.Now()}
	}
}

// isReached reports whether nothing else is asked of a node, and nothing goes on there, which its report says a little later (15002, 16192).
func isReached(n cluster.Node, policies []v1alpha1.GPUSharingPolicy) bool {
	by, want, err := desired(&n, policies)
	return by != nil && err == nil && want.Config.Key == n.GPU.Spec.ConfigName && !invariant.Disturbed(n)
}

// allServed: at rest no pod waits for an instance that could be made beside those in use.
func (s *run) allServed() {
	for _, pod := range s.podsOn("") {
		for _, p := range s.Machines() {
			by, want, err := s.Desired(p)
			if _, calm := s.isCalm(p.name); s.waiting.pods[pod.Name] == nil || !calm || err != nil || len(want.OnDemand) == 0 || by.Spec.Rollout.Paused ||
				len(by.OnDemand().Reserve) > 0 || keptOff(&pod, s.nodeOf(p).Taints) ||
				slices.ContainsFunc(s.podsOn(p.name), func(o corev1.Pod) bool { return o.DeletionTimestamp != nil }) {
				continue
			}
			held := slices.Concat(slices.Collect(maps.Values(p.node.Allocations()))...)
			for _, d := range p.devices() {
				if slices.Contains(want.OnDemand, d.UUID) && hasRoom(by, d, held, askedBy(&pod)) {
					s.Breaks("demand", "pod %s waits at rest for %s, for which GPU %d of %s has room", pod.Name, askedBy(&pod), d.Index, p.name)
				}
			}
		}
	}
}

// hasRoom reports whether a policy lets an instance be made beside those of a GPU that are held.
func hasRoom(by *v1alpha1.GPUSharingPolicy, d gpu.Device, held []string, resource string) (has bool) {
	stay := slices.DeleteFunc(slices.Clone(d.State.Instances), func(i gpu.Instance) bool { return !d.InUse(i.ID) && !slices.Contains(held, i.UUID) })
	for _, name := range by.OnDemand().Profiles {
		if p, err := mig.Resolve(d, string(name)); err == nil && plan.ResourceOf(p.Name) == resource {
			_ = mig.Beside(d, stay, nil, []string{p.Name}, func(further []gpu.Instance) { has = has || len(further) > 0 })
		}
	}
	return has
}

// repartitioned reports whether a GPU had something else than at rest, for a pod.
func (s *run) repartitioned() bool {
	s.record.mu.Lock()
	defer s.record.mu.Unlock()
	return slices.ContainsFunc(s.record.happened, func(h happening) bool {
		return h.gpu != nil && h.gpu.Status.Rollout.LastGood != nil && slices.ContainsFunc(h.gpu.Status.Demand, func(e v1alpha1.GPUDemand) bool {
			return e.FirstPod != "" && slices.ContainsFunc(h.gpu.Status.Rollout.LastGood.Devices, func(d v1alpha1.DeviceSpec) bool {
				return d.UUID == e.UUID && equal(d.Sharing.Instances, e.Instances)
			})
		})
	})
}
