// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"regexp"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestNoFightGoesOnWithoutEnd: what another controller undoes again and again is written a few times in an hour. The
// status names the write and how to find the other controller. A change of the policies is carried out at once all the
// same.
func TestNoFightGoesOnWithoutEnd(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.Repeats = &action.Repeats{}
	h := c.add("a", sim.A100)
	c.setPolicy("research", mps(4))
	c.run(60)
	g.Expect(h.features.ours).NotTo(BeZero())
	clear(c.writes)
	var d rollout.Decision
	round := func(step time.Duration) {
		h.features.ours, c.Configs = time.Time{}, nil
		d = c.memory.decide(c.world())
		for _, a := range d.Actions {
			c.do(a)
			c.Repeats.Note(a, c.Now)
		}
		c.tick(step)
	}
	for range 300 {
		round(time.Second)
	}
	g.Expect(c.writes).To(Equal(map[string]int{"action.KeepMPSOff": 8, "action.WriteConfigs": 8, "action.Report": 1}))
	hasReason(g, d, v1alpha1.ReasonChangedByOthers)
	g.Expect(one(d).Message).To(And(ContainSubstring("NodeFeature zz-gpu-sharing-a"), ContainSubstring("--show-managed-fields")))
	g.Expect(d.After).To(BeNumerically(">", 50*time.Minute), "it is tried again then")
	c.tick(d.After)
	round(time.Second)
	g.Expect(c.writes).To(HaveKeyWithValue("action.WriteConfigs", 9))

	for range 20 {
		round(time.Second)
	}
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mps(8), 2
	writes := c.writes["action.WriteConfigs"]
	round(time.Second)
	g.Expect(c.writes["action.WriteConfigs"]).To(Equal(writes + 1))
}

// TestAFightIsReportedOnce: the operator writes the time with the selected configuration. What it reports about a write
// that has to wait does not change with it.
func TestAFightIsReportedOnce(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.Repeats = &action.Repeats{}
	h := c.add("a", sim.A100)
	c.setPolicy("research", mps(4))
	var d rollout.Decision
	for range 300 {
		delete(h.Annotations, "gpusharing.io/selected")
		d = c.memory.decide(c.world())
		for _, a := range d.Actions {
			c.do(a)
			c.Repeats.Note(a, c.Now)
		}
		c.tick(time.Second)
	}
	hasReason(g, d, v1alpha1.ReasonChangedByOthers)
	g.Expect(c.writes["action.Report"]).To(BeNumerically("<", 10))
}

// TestAFightLeavesNoNodeTainted: what keeps pods off a node has to wait sooner than what lets them return, which has
// its limit too.
func TestAFightLeavesNoNodeTainted(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.Repeats = &action.Repeats{}
	decided := func(after action.Action, times int) bool {
		for range times {
			c.Repeats.Note(after, c.Now)
		}
		return slices.ContainsFunc(rollout.Decide(c.world()).Actions, func(a action.Action) bool { return a.String() == after.String() })
	}
	rollout.Decide(c.world()) // counts from these policies on
	taint := action.Taint{Node: "a", Taint: corev1.Taint{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule}}
	g.Expect(decided(taint, 0)).To(BeTrue())
	g.Expect(decided(taint, 8)).To(BeFalse())

	h.Taints = []corev1.Taint{taint.Taint}
	h.Annotations[v1alpha1.AnnotationStopped], h.Labels[pluginLabel] = pluginLabel, "paused-for-mig-change"
	c.Policies = nil
	rollout.Decide(c.world())
	for _, a := range rollout.Decide(c.world()).Actions {
		g.Expect(decided(a, 8)).To(BeTrue(), a.String())
		g.Expect(decided(a, 8)).To(BeFalse(), a.String())
	}
}

// TestAFightIsReportedWithTheTimeAtWhichItGoesOn, and not with an earlier one at which something else is due on the
// node.
func TestAFightIsReportedWithTheTimeAtWhichItGoesOn(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.Repeats = &action.Repeats{}
	c.hold(h, "train", 0, gpu.WholeGPU)
	c.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy", Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}}}
	c.Policies[0].Spec.Taints = []v1alpha1.Taint{{Key: "team", Effect: "NoSchedule"}}
	var d rollout.Decision
	for range 60 {
		d = c.memory.decide(c.world())
		for _, a := range d.Actions {
			c.do(a)
			c.Repeats.Note(a, c.Now)
		}
		h.Taints = slices.DeleteFunc(h.Taints, func(t corev1.Taint) bool { return t.Key == "team" })
		c.version[h.Name]++
		c.tick(time.Second)
	}
	hasState(g, d, node.Draining)
	hasReason(g, d, v1alpha1.ReasonChangedByOthers)
	said := regexp.MustCompile("waits until ([0-9:]+) UTC").FindStringSubmatch(one(d).Message)
	g.Expect(said).To(HaveLen(2), one(d).Message)
	until, err := time.Parse(time.TimeOnly, said[1])
	g.Expect(err).NotTo(HaveOccurred())
	now, err := time.Parse(time.TimeOnly, c.Now.UTC().Format(time.TimeOnly))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(until.Sub(now)).To(BeNumerically(">", 50*time.Minute), one(d).Message)
}

// TestOurOwnWritesAreNoFight: what the operator itself has undone it writes again as often as it takes, and withholds
// nothing from a node.
func TestOurOwnWritesAreNoFight(t *testing.T) {
	t.Run("pools scale to zero and back, so that the config of one goes with that of another", func(t *testing.T) {
		g := NewWithT(t)
		c := pools(6, func(int) v1alpha1.Sharing { return timeSlicing(4) })
		for n := range 24 {
			h := c.addTo(n%6, n)
			g.Expect(c.readyWithin(h, 4*time.Minute)).To(BeTrue(), "%s: %s", h.Name, h.waits())
			delete(c.hosts, h.Name)
			c.counts(4, 15*time.Second)
		}
	})
	t.Run("a node joins each of nine pools, so that each needs another config", func(t *testing.T) {
		g := NewWithT(t)
		c := pools(9, func(i int) v1alpha1.Sharing { return mig(count("1g", int32(1+i%7))) })
		for n := range 9 {
			h := c.addTo(n, n)
			g.Expect(c.readyWithin(h, 2*time.Minute)).To(BeTrue(), "%s: %s", h.Name, h.waits())
		}
	})
	t.Run("a scale set of one machine scales to zero and back, so that each Node has the same name", func(t *testing.T) {
		g := NewWithT(t)
		c := pools(1, func(int) v1alpha1.Sharing { return timeSlicing(4) })
		for n := range 24 {
			h := c.addTo(0, 0)
			g.Expect(c.readyWithin(h, 2*time.Minute)).To(BeTrue(), "machine %d: %s", n, h.waits())
			delete(c.hosts, h.Name)
			c.counts(4, 15*time.Second)
		}
	})
	t.Run("short jobs follow one another under drain mode Never", func(t *testing.T) {
		g := NewWithT(t)
		c, h := toMIG(neverEvicting)
		c.Repeats = &action.Repeats{}
		for n := range 30 {
			c.job(h, n, 100*time.Second)
			g.Expect(h.waits()).To(ContainSubstring(v1alpha1.ReasonGPUInUse), "after %d jobs", n)
		}
		g.Expect(c.writes).NotTo(HaveKey("action.Taint"), "a pod that was bound just now is known before it is reported")
	})
	t.Run("another controller undoes a write that the operator itself undoes now and then", func(t *testing.T) {
		g := NewWithT(t)
		repeats := &action.Repeats{}
		taint, untaint := action.Taint{Node: "a"}, action.Untaint{Node: "a"}
		now := time.Unix(0, 0)
		for range 20 {
			repeats.Note(taint, now)
			repeats.Note(untaint, now)
		}
		g.Expect(repeats.Remaining(taint, time.Time{}, now)).To(BeZero())
		for range 8 {
			repeats.Note(taint, now)
		}
		g.Expect(repeats.Remaining(taint, time.Time{}, now)).To(Equal(time.Hour))
	})
	t.Run("a patch of which another controller undoes a part, and the operator itself the rest", func(t *testing.T) {
		g := NewWithT(t)
		repeats := &action.Repeats{}
		now := time.Unix(0, 0)
		patch := func(labels map[string]*string) action.PatchNode { return action.PatchNode{Node: "a", Labels: labels} }
		stops := patch(map[string]*string{"plugin": new("stopped"), "discovery": new("stopped")})
		for range 8 {
			g.Expect(repeats.Remaining(stops, time.Time{}, now)).To(BeZero())
			repeats.Note(stops, now)
			repeats.Note(patch(map[string]*string{"discovery": new("true")}), now)
		}
		g.Expect(repeats.Remaining(stops, time.Time{}, now)).To(Equal(time.Hour))
		g.Expect(repeats.Remaining(patch(map[string]*string{"discovery": new("stopped")}), time.Time{}, now)).To(BeZero())
	})
	t.Run("up to once in a minute", func(t *testing.T) {
		g := NewWithT(t)
		repeats := &action.Repeats{}
		taint, untaint := action.Taint{Node: "a"}, action.Untaint{Node: "a"}
		now := time.Unix(1000, 0)
		writes := 0
		for range 3600 {
			repeats.Begin("", now)
			for _, a := range []action.Action{taint, untaint} {
				if repeats.Remaining(a, time.Time{}, now) == 0 {
					repeats.Note(a, now)
					writes++
				}
			}
			now = now.Add(time.Second)
		}
		g.Expect(writes).To(Equal(120), "in an hour")
		g.Expect(repeats.Returns(taint)).To(BeTrue())
		repeats.Begin("", now)
		g.Expect(repeats.Remaining(taint, time.Time{}, now)).To(BeZero())
	})
	t.Run("claims of monitors come and go", func(t *testing.T) {
		g := NewWithT(t)
		repeats := &action.Repeats{}
		for range 20 {
			for _, claims := range [][]string{{"monitoring/dcgm"}, nil} {
				set := action.SetSpec{Node: "a", Spec: v1alpha1.GPUNodeSpec{AdminClaims: claims}, Why: "recording the ResourceClaims of monitors"}
				g.Expect(repeats.Remaining(set, time.Time{}, time.Unix(0, 0))).To(BeZero())
				repeats.Note(set, time.Unix(0, 0))
			}
		}
	})
}

// pools is a cluster with so many policies, each for a pool of its own, as yet without nodes.
func pools(many int, sharing func(pool int) v1alpha1.Sharing) *site {
	c := newSite()
	c.Repeats = &action.Repeats{}
	for i := range many {
		name := fmt.Sprint("pool-", i)
		c.Policies = append(c.Policies, policyOf(name, sharing(i), func(p *v1alpha1.GPUSharingPolicy) {
			p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": name}}
		}))
	}
	return c
}

// addTo adds a node to a pool.
func (c *site) addTo(pool, node int) *host {
	h := c.add(fmt.Sprint("node-", node), sim.A100)
	h.Labels["pool"], h.Created = fmt.Sprint("pool-", pool), c.Now
	return h
}

// counts lets so many reconciles follow one another, and counts what they write.
func (c *site) counts(reconciles int, each time.Duration) {
	for range reconciles {
		c.noted(each)
	}
}

// readyWithin reports whether a node is in its desired state within a time.
func (c *site) readyWithin(h *host, d time.Duration) bool {
	for end := c.Now.Add(d); c.Now.Before(end); {
		c.noted(2 * time.Second)
		if ready, _ := condition.Find(h.GPU.Status.Conditions, v1alpha1.ConditionReady); ready.Reason == v1alpha1.ReasonReady {
			return true
		}
	}
	return false
}

// job is one of a queue: its pod is bound as soon as the one before has ended, and the agent reports it 2 s later.
func (c *site) job(h *host, n int, lasts time.Duration) {
	name := fmt.Sprint("job-", n)
	pod := cluster.Pod{Namespace: "user", Name: name, UID: "uid-" + name, Controller: "Job", GPU: true, Scheduled: c.Now}
	if len(h.Taints) == 0 {
		h.Pods = append(h.Pods, pod)
	}
	c.noted(2 * time.Second)
	h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.Name == name })
	c.hold(h, name, 0, gpu.WholeGPU)
	c.counts(int(lasts/(10*time.Second)), 10*time.Second)
	c.end(h, name)
}

// TestADeletionThatIsRefusedBlocksNoOther: a test workload of NVIDIA's validator stays, and NVIDIA's DRA driver must
// be restarted.
func TestADeletionThatIsRefusedBlocksNoOther(t *testing.T) {
	g := NewWithT(t)
	now := time.Unix(0, 0)
	refused := action.DeletePod{Node: "a", Pod: "nvidia-cuda-validator-x", Why: "it is a test"}
	driver := action.DeletePod{Node: "a", Pod: "dra-1", Why: "it has not seen the instances"}
	r := &action.Repeats{}
	r.Begin("", now)
	for range 20 {
		r.Note(refused, now)
	}
	g.Expect(r.Remaining(refused, time.Time{}, now)).To(Equal(time.Hour))
	g.Expect(r.Remaining(driver, time.Time{}, now)).To(BeZero())
}

// TestAFailureThatCannotBeRecordedIsRefusedOnceAMinute: the record has the time of each try.
func TestAFailureThatCannotBeRecordedIsRefusedOnceAMinute(t *testing.T) {
	g := NewWithT(t)
	at := func(now time.Time) action.Report {
		failed := &v1alpha1.FailedChange{Reason: v1alpha1.ReasonNotAdvertised, Time: metav1.NewTime(now)}
		return action.Report{Node: "a", Why: "recording that the change failed", Status: v1alpha1.GPUNodeStatus{Rollout: v1alpha1.RolloutStatus{Failed: failed}}}
	}
	now := time.Unix(1_800_000_000, 0)
	r := &action.Repeats{}
	r.Begin("", now)
	r.Refuse(at(now), "denied by webhook", now)
	later := now.Add(time.Second)
	g.Expect(r.Remaining(at(later), time.Time{}, later)).To(Equal(action.RefusedAgain - time.Second))
}

// TestAGPUNodeThatIsNotWrittenHasOneCopy: where a GPU is to be forgotten and each write of GPUNode.spec is refused, the copy on the Node is written once.
func TestAGPUNodeThatIsNotWrittenHasOneCopy(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting)
	c.run(200)
	c.Policies[0].Spec.GPUSelector, c.Policies[0].Generation = &v1alpha1.GPUMatch{Indexes: []int32{0}}, 2
	copies, forgets := 0, false
	for range 300 {
		for _, a := range rollout.Decide(c.world()).Actions {
			set, is := a.(action.SetSpec)
			if forgets = forgets || is && len(set.Spec.Baseline.Devices) == 1; forgets && is {
				continue
			}
			if patch, is := a.(action.PatchNode); is && patch.Annotations[v1alpha1.AnnotationBaseline] != nil && forgets {
				copies++
			}
			c.do(a)
		}
		c.tick(time.Second)
	}
	g.Expect(forgets).To(BeTrue())
	g.Expect(h.devices()[1].State.MIG).To(BeFalse())
	g.Expect(copies).To(BeNumerically("<=", 1))
}
