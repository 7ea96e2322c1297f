// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/invariant"
)

// TestEveryFaultInEveryState strikes a rollout of MIG over three nodes, one at a time, after each of its reconciles.
// Whatever the fault, the budget holds at every write, and in the end nothing is left tainted, paused, without its
// label or without its GPUs, and nothing of the user's is lost (invariant.Broken). What else becomes of it is the
// outcome.
func TestEveryFaultInEveryState(t *testing.T) {
	for name, f := range faults() {
		t.Run(name, func(t *testing.T) {
			states := map[node.State]bool{}
			for n := range 18 {
				o := newFaultRun(t, f.sharing)
				for range n {
					o.reconcile()
				}
				for _, s := range o.last.Nodes {
					states[s.State] = true
				}
				f.strike(o)
				o.through()
				if f.intrudes {
					o.beside = nil
				}
				o.intact(fmt.Sprintf("struck after reconcile %d", n))
				f.outcome(o)
			}
			through := []node.State{
				node.PendingDisruptive, node.Draining, node.Idle, node.Selecting,
				node.Verifying, node.UpToDate,
			}
			if f.sharing == nil { // MIG takes several steps
				through = append(through, node.StoppingOperands, node.Applying)
			}
			for _, s := range through {
				NewWithT(t).Expect(states).To(HaveKey(s), "a node was struck in each state")
			}
		})
	}
}

// fault is what happens in the middle of a rollout, and what is so after it besides what always is.
type fault struct {
	strike  func(*faultRun)
	outcome func(*faultRun)
	// sharing is what the policy asks for; nil: MIG.
	sharing *v1alpha1.Sharing
	// intrudes says that the fault itself brings NVIDIA's MPS DaemonSet beside the operator's daemons.
	intrudes bool
}

// faults are those that issue and architecture name, each with its outcome.
func faults() map[string]fault {
	return map[string]fault{
		"the API server is away for a minute: the rollout goes on": {
			strike: func(o *faultRun) { o.away(time.Minute) }, outcome: inDesiredState,
		},
		"every write is refused once for throttling: it is made again": {
			strike: func(o *faultRun) { o.attempts = map[string]int{} }, outcome: inDesiredState,
		},
		"every write is refused for a minute for throttling: the rollout goes on": {
			strike: func(o *faultRun) { o.throttled = o.Now.Add(time.Minute) }, outcome: inDesiredState,
		},
		"every write that must not overtake another is refused once with a conflict: it is decided anew": {
			strike: func(o *faultRun) { o.conflicts = map[string]int{} }, outcome: inDesiredState,
		},
		"the leader is killed after each write: the next one goes on": {
			strike: func(o *faultRun) { o.mortal = true }, outcome: inDesiredState,
		},
		"an agent is lost in the middle of a step: it is waited for": {
			strike: func(o *faultRun) {
				h := o.hosts["b"]
				o.lose(h, 3)
				for range 60 {
					o.reconcile()
				}
				h.hardware.Fail, h.AgentReady = nil, true
			}, outcome: inDesiredState,
		},
		"a node is deleted while it changes, and comes back as a new one: it is changed anew": {
			strike: func(o *faultRun) { delete(o.hosts, "a"); o.reconcile(); o.join("a") }, outcome: inDesiredState,
		},
		"the policy is edited three times: the last edit counts": {
			strike: func(o *faultRun) {
				for _, s := range []v1alpha1.Sharing{timeSlicing(4), mps(4), mig(count("3g", 2))} {
					o.Policies[0].Spec.Sharing = s
					o.Policies[0].Generation++
					o.reconcile()
					o.reconcile()
				}
			}, outcome: inDesiredState,
		},
		"a budget never allows the eviction: the node takes pods again and the pod is named": {
			strike:  func(o *faultRun) { o.protected = "train" },
			outcome: func(o *faultRun) { o.inUseOrDone("pod user/train") },
		},
		"an eviction is neither answered nor carried out: the node takes pods again and the pod is named": {
			strike:  func(o *faultRun) { o.unanswered, o.protected = "train", "train" },
			outcome: func(o *faultRun) { o.inUseOrDone("pod user/train") },
		},
		"an eviction is carried out and not answered: the rollout goes on": {
			strike: func(o *faultRun) { o.unanswered = "train" }, outcome: inDesiredState,
		},
		"a pod that was told to go does not: the node takes pods again and the pod is named": {
			strike:  func(o *faultRun) { o.hangs = "train" },
			outcome: func(o *faultRun) { o.inUseOrDone("pod user/train") },
		},
		"our ConfigMap is deleted by hand: it is written again": {
			strike: func(o *faultRun) { o.Configs = nil }, outcome: inDesiredState,
		},
		"our keys are edited by hand: they are written again": {
			strike: func(o *faultRun) {
				for key := range o.Configs {
					o.Configs[key] = "version: v1\n"
				}
			}, outcome: inDesiredState,
		},
		"the label that selects our key is removed by hand: it is set again": {
			strike: func(o *faultRun) { o.each(func(h *host) { delete(h.Labels, v1alpha1.LabelConfig) }) }, outcome: inDesiredState,
		},
		"our taint is removed by hand: it is added again while it is needed": {
			strike: func(o *faultRun) { o.each(func(h *host) { h.Taints = withoutOurs(h.Taints) }) }, outcome: inDesiredState,
		},
		"NVIDIA's operands are started by hand: they are stopped again while it is needed": {
			strike: func(o *faultRun) {
				o.each(func(h *host) { h.Labels[pluginLabel], h.Labels[gfdLabel] = "true", "true" })
			}, outcome: inDesiredState,
		},
		"the ClusterPolicy is deleted and another one made: the rollout stands still, then goes on": {
			strike: func(o *faultRun) {
				o.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonNoDevicePlugin, Message: "there is no ClusterPolicy"}
				o.reconcile()
				o.reconcile()
				o.Plugin = cluster.DevicePlugin{ClusterPolicy: true}
				o.reconcile()
				o.Plugin.Ready = true
			}, outcome: inDesiredState,
		},
		"NFD begins to ignore our NodeFeatures: nodes that are not served yet stay as they were, and it is named": {
			strike: func(o *faultRun) { o.nfd.denies = true }, outcome: servedOrNamed(v1alpha1.ReasonNodeFeatureIgnored),
			sharing: new(mps(4)), intrudes: true,
		},
		"our NodeFeatures are deleted by hand: they are written again": {
			strike: func(o *faultRun) { o.each(func(h *host) { h.features.ours = time.Time{} }) },
			outcome: func(o *faultRun) {
				inDesiredState(o)
				o.each(func(h *host) { o.Expect(h.features.ours).NotTo(BeZero()) })
			},
			sharing: new(mps(4)), intrudes: true,
		},
		"the kind NodeFeature is deleted: nodes that are not served yet stay as they were, and it is named": {
			strike: func(o *faultRun) {
				o.Plugin.NodeFeatures = false
				o.each(func(h *host) { h.features = features{merged: map[string]bool{}} })
			},
			outcome: servedOrNamed(v1alpha1.ReasonNoNodeFeatures),
			sharing: new(mps(4)),
		},
	}
}

// faultRun is a rollout that is struck.
type faultRun struct {
	*site
	*WithT
	before cluster.Snapshot
	last   rollout.Decision

	reconciles int
	attempts   map[string]int // of each write, of which every other one is refused; nil: none is
	conflicts  map[string]int // likewise, of the writes that are made to an object as it was read
	throttled  time.Time      // until when every write is refused
	mortal     bool           // a leader makes one write only
	protected  string         // a pod whose eviction is refused
	hangs      string         // a pod that does not go

	unanswered string // a pod whose eviction takes its time, and then nobody knows what became of it
}

func newFaultRun(t *testing.T, sharing *v1alpha1.Sharing) *faultRun {
	t.Helper()
	o := &faultRun{site: newSite(), WithT: NewWithT(t)}
	for _, name := range []string{"a", "b", "c"} {
		o.join(name)
	}
	o.hold(o.hosts["b"], "train", 0, gpu.WholeGPU)
	o.tick(time.Minute)
	o.before = o.world()
	if sharing == nil {
		sharing = new(mig(count("2g", 3)))
	}
	o.setPolicy("research", *sharing, evicting)
	return o
}

// join adds a node, with what its user has put on it.
func (o *faultRun) join(name string) {
	h := o.add(name, sim.A100, sim.A100)
	h.Labels[v1alpha1.LabelMIGManager], h.Labels["team.example/pool"] = "true", "research"
	h.Annotations["team.example/owner"] = "us"
	h.Taints = []corev1.Taint{{Key: "team.example/only", Effect: corev1.TaintEffectNoSchedule}}
}

func (o *faultRun) each(do func(*host)) {
	for _, h := range o.hosts {
		do(h)
	}
}

func withoutOurs(taints []corev1.Taint) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(taints), func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging })
}

// reconcile is one with its faults, and a second in which others act every other time, so that each state is met.
func (o *faultRun) reconcile() {
	o.last = o.sleeps.decide(o.world(), rollout.Decide)
	for _, a := range o.last.Actions {
		if o.refused(a) {
			continue
		}
		o.do(a)
		o.withinBudget(a)
		if o.mortal {
			break
		}
	}
	for i := range o.Policies {
		o.Policies[i].Status = o.last.Policies[o.Policies[i].Name]
	}
	if o.reconciles++; o.reconciles%2 == 0 {
		o.tick(time.Second)
	} else {
		o.Now = o.Now.Add(time.Second)
	}
}

// refused reports whether the API server does not carry an action out.
func (o *faultRun) refused(a action.Action) bool {
	if e, evicts := a.(action.Evict); evicts {
		if e.Pod == o.unanswered {
			const answerTime = 5 * time.Second // of internal/kube/drain
			o.Now = o.Now.Add(answerTime)
		}
		if e.Pod == o.protected || e.Pod == o.hangs {
			return true
		}
	}
	return o.Now.Before(o.throttled) || everyOther(o.attempts, a) || locked(a) && everyOther(o.conflicts, a)
}

// everyOther counts attempts of each write, and reports whether this one is to be refused; none is where nothing is
// counted.
func everyOther(attempts map[string]int, a action.Action) bool {
	if attempts == nil {
		return false
	}
	write := fmt.Sprintf("%T of %s", a, a.NodeName())
	attempts[write]++
	return attempts[write]%2 == 1
}

func (o *faultRun) withinBudget(a action.Action) {
	disturbed := 0
	for _, h := range o.hosts {
		if invariant.Disturbed(*h.Node) {
			disturbed++
		}
	}
	o.Expect(disturbed).To(BeNumerically("<=", 1), a.String())
}

// away lets time pass in which nobody can read or write.
func (o *faultRun) away(d time.Duration) {
	o.Now = o.Now.Add(d)
	o.each(func(h *host) { h.converge() })
}

// lose lets the agent of a node be lost after so many changes of its hardware.
func (o *faultRun) lose(h *host, after int) {
	h.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpObserve {
			return nil
		}
		if after--; after < 0 {
			h.AgentReady = false
			return sim.ErrCrash
		}
		return nil
	}
}

// through reconciles until nothing is left to do; where only a deadline is waited for, it comes at once.
func (o *faultRun) through() {
	for idle := 0; ; idle++ {
		o.reconcile()
		if len(o.last.Actions) > 0 {
			idle = 0
		}
		if idle < 6 {
			continue // others may not have acted yet
		}
		if o.last.After == 0 {
			return
		}
		o.tick(o.last.After)
		idle = 0
		o.Expect(o.Now.Sub(o.before.Now)).To(BeNumerically("<", 24*time.Hour), "it ends: %v", o.last.Nodes)
	}
}

func (o *faultRun) intact(when string) {
	o.Expect(o.crashes).To(BeEmpty(), when)
	o.Expect(o.killed).To(BeEmpty(), when)
	o.Expect(o.beside).To(BeEmpty(), when)
	evicted := []string{}
	for _, name := range o.evicted {
		evicted = append(evicted, "user/"+name)
	}
	o.Expect(invariant.Broken(o.before, o.world(), evicted...)).To(BeEmpty(), when)
	for _, h := range o.hosts {
		o.Expect(h.plugin.uuids).To(ConsistOf(h.instances()), when)
	}
}

// inDesiredState is the outcome that every node is, and that nobody but the holder had to go.
func inDesiredState(o *faultRun) {
	o.Expect(o.last.Policies["research"].Nodes.Ready).To(Equal(int32(3)), "%v", o.last.Nodes)
	o.Expect(o.evicted).To(Equal([]string{"train"}))
}

// inUseOrDone is the outcome that a node which does not become idle takes pods again, and reports the blockers; unless
// it was idle before.
func (o *faultRun) inUseOrDone(who string) {
	if len(o.evicted) > 0 {
		inDesiredState(o)
		return
	}
	for _, n := range o.last.Nodes {
		if n.Node == "b" {
			o.Expect(n.State).To(Equal(node.Failed))
			o.Expect(n.Reason).To(Equal(v1alpha1.ReasonDrainTimedOut))
			o.Expect(n.Message).To(ContainSubstring(who))
		}
	}
}

// servedOrNamed is the outcome that each node is in the desired state, or was not begun with, for that reason.
func servedOrNamed(reason string) func(*faultRun) {
	return func(o *faultRun) {
		for _, n := range o.last.Nodes {
			if n.State == node.UpToDate && n.Reason == v1alpha1.ReasonReady {
				o.Expect(o.hosts[n.Node].daemons).To(HaveLen(1))
				continue
			}
			o.Expect(n.Reason).To(Or(Equal(reason), Equal(v1alpha1.ReasonRolloutHalted)), "%+v", n)
		}
	}
}
