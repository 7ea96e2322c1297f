// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// emptying is a policy that drains a node of all its pods before a reboot.
func emptying(mode v1alpha1.DrainMode) v1alpha1.GPUSharingPolicy {
	p := rebooting(mode)
	p.Spec.Rollout.Drain.BeforeReboot = v1alpha1.BeforeRebootAllPods
	return p
}

// runs lets a pod run on the host that holds no GPU.
func (c *site) runs(h *host, name string, change ...func(*cluster.Pod)) {
	p := cluster.Pod{Namespace: "user", Name: name, UID: "uid-" + name, Controller: "ReplicaSet", Scheduled: c.Now.Add(-time.Hour)}
	for _, change := range change {
		change(&p)
	}
	h.Pods = append(h.Pods, p)
}

// besides lets pods run on the host that hold no GPU, one of each kind.
func (c *site) besides(h *host) {
	c.runs(h, "web")
	c.runs(h, "bare", func(p *cluster.Pod) { p.Controller = "" })
	c.runs(h, "static", func(p *cluster.Pod) { p.Controller, p.Mirror = "Node", true })
	c.runs(h, "daemon", func(p *cluster.Pod) { p.Controller = "DaemonSet" })
	c.runs(h, "controller", func(p *cluster.Pod) { p.Own = true })
}

// users are the pods of users on the host, by name.
func (h *host) users() []string {
	var names []string
	for _, p := range h.userPods() {
		names = append(names, p.Name)
	}
	slices.Sort(names)
	return names
}

// untilPermitted reconciles until the agent may reboot the host.
func (c *site) untilPermitted(g Gomega, h *host) {
	for range 200 {
		if h.GPU.Spec.Reboot != nil {
			return
		}
		c.reconcile()
		if h.GPU.Spec.Reboot == nil {
			c.tick(time.Second)
		}
	}
	g.Expect(h.GPU.Spec.Reboot).NotTo(BeNil())
}

func TestANodeIsDrainedOfItsOtherPodsBeforeARebootIfThePolicySaysSo(t *testing.T) {
	for name, tt := range map[string]struct {
		pods          v1alpha1.BeforeReboot
		evicted, stay []string
		again         []string
	}{
		"all pods":            {v1alpha1.BeforeRebootAllPods, []string{"train", "bare", "web"}, []string{"controller", "daemon", "static"}, []string{"other"}},
		"pods that hold GPUs": {v1alpha1.BeforeRebootGPUPods, []string{"train"}, []string{"bare", "controller", "daemon", "static", "web"}, nil},
		"by default":          {"", []string{"train"}, []string{"bare", "controller", "daemon", "static", "web"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := c.add("a", sim.A100, sim.A100).virtual()
			c.hold(h, "train", 0, gpu.WholeGPU)
			c.besides(h)
			p := emptying(v1alpha1.DrainModeEvict)
			p.Spec.Rollout.Drain.BeforeReboot = tt.pods
			c.Policies = []v1alpha1.GPUSharingPolicy{p}
			for !h.required {
				c.steps(1)
				g.Expect(c.evicted).To(Or(BeEmpty(), Equal([]string{"train"})), "pods that hold no GPU stay until it is known that a reboot is needed")
			}
			c.untilPermitted(g, h)
			g.Expect(c.evicted).To(Equal(tt.evicted))
			g.Expect(h.users()).To(Equal(tt.stay))
			d, _ := c.run(400)
			g.Expect(h.reboots).To(HaveLen(1))
			g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), "%+v", d.Nodes[0])
			g.Expect(h.Taints).To(BeEmpty())

			c.evicted = nil
			c.runs(h, "other")
			c.Policies = nil
			d, _ = c.run(400)
			g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
			g.Expect(h.reboots).To(HaveLen(2), "the way back needs a reboot too")
			g.Expect(c.evicted).To(Equal(tt.again), "the node is released as the last policy said")
		})
	}
}

// TestPodsThatBlockARebootAreListed, with what happens to each, by the plan as by the status.
func TestPodsThatBlockARebootAreListed(t *testing.T) {
	for mode, handling := range map[v1alpha1.DrainMode]string{
		v1alpha1.DrainModeEvict:       "is evicted, as far as PodDisruptionBudgets allow",
		v1alpha1.DrainModeWaitForIdle: "is waited for, up to 10m0s (rollout.drain)",
		v1alpha1.DrainModeNever:       "is waited for, however long, while the node takes new pods (rollout.drain.mode Never)",
	} {
		t.Run(string(mode), func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := c.add("a", sim.A100).virtual()
			c.besides(h)
			c.Policies = []v1alpha1.GPUSharingPolicy{emptying(mode)}
			for !h.required {
				c.steps(1)
			}
			d := rollout.Decide(c.world())
			g.Expect(d.Nodes[0].Plan).To(ContainElement("reboot the node"))
			var lines []string
			for _, b := range d.Nodes[0].Blockers {
				lines = append(lines, b.String())
			}
			g.Expect(lines).To(Equal([]string{
				"pod user/bare uses the node, which must be rebooted: " + handling,
				"pod user/web uses the node, which must be rebooted: " + handling,
			}))
			for range 5 {
				for _, a := range rollout.Decide(c.world()).Actions {
					if _, evicts := a.(action.Evict); !evicts { // a PodDisruptionBudget refuses that
						c.do(a)
					}
				}
				c.tick(time.Second)
			}
			g.Expect(h.GPU.Status.Rollout.Blockers).To(Equal([]v1alpha1.BlockerStatus{
				{Kind: v1alpha1.BlockerKindPod, Namespace: "user", Name: "bare", Handling: handling},
				{Kind: v1alpha1.BlockerKindPod, Namespace: "user", Name: "web", Handling: handling},
			}))
		})
	}
}

// TestARebootWaitsForOtherPodsThatMustNotBeEvicted until the time for draining is over, and as long as they are there.
// Then the node takes pods again.
func TestARebootWaitsForOtherPodsThatMustNotBeEvicted(t *testing.T) {
	for mode, reason := range map[v1alpha1.DrainMode]string{
		v1alpha1.DrainModeNever: v1alpha1.ReasonGPUInUse, v1alpha1.DrainModeWaitForIdle: v1alpha1.ReasonDrainTimedOut,
	} {
		t.Run(string(mode), func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := c.add("a", sim.A100).virtual()
			c.runs(h, "web")
			c.Policies = []v1alpha1.GPUSharingPolicy{emptying(mode)}
			d, _ := c.run(1500)
			g.Expect(h.reboots).To(BeEmpty())
			g.Expect(c.evicted).To(BeEmpty())
			g.Expect(d.Nodes[0].Reason).To(Equal(reason))
			g.Expect(d.Nodes[0].Message).To(ContainSubstring("pod user/web (the node, which must be rebooted)"))
			g.Expect(h.Taints).To(BeEmpty(), "the node is not held out for ever")
			g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
			version := c.version["a"]
			c.during(2*time.Hour, 10*time.Second)
			g.Expect(c.version["a"]).To(Equal(version), "nothing is written again and again")

			c.end(h, "web")
			c.tick(time.Minute)
			d, _ = c.run(400)
			g.Expect(h.reboots).To(HaveLen(1))
			g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), "%+v", d.Nodes[0])
		})
	}
}

// TestTheTimeForDrainingANodeBeforeItsRebootBeginsInAWindow: what a window that closes leaves undone, the next one has
// its whole time for.
func TestTheTimeForDrainingANodeBeforeItsRebootBeginsInAWindow(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100).virtual()
	c.runs(h, "web")
	p := emptying(v1alpha1.DrainModeWaitForIdle)
	inWindows(tonight)(&p)
	c.Policies = []v1alpha1.GPUSharingPolicy{p}
	c.at("2027-03-02T01:55:00Z")
	d := c.during(4*time.Minute, time.Second)
	g.Expect(d.Nodes[0].State).To(Equal(node.Draining), d.Nodes[0].Message)
	c.at("2027-03-02T02:00:00Z")
	d = c.during(time.Hour, 10*time.Second)
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonOutsideWindow), d.Nodes[0].Message)
	g.Expect(h.Taints).To(BeEmpty(), "the node takes pods meanwhile")
	c.at("2027-03-02T22:00:00Z")
	d = c.during(9*time.Minute, time.Second)
	g.Expect(d.Nodes[0].State).To(Equal(node.Draining), d.Nodes[0].Message)
	c.end(h, "web")
	c.run(400)
	g.Expect(h.reboots).To(HaveLen(1))
	g.Expect(c.ready()).To(Equal(1))
}

// TestAPodThatComesOnceARebootIsPermittedIsNotWaitedFor: the agent may be rebooting the node already.
func TestAPodThatComesOnceARebootIsPermittedIsNotWaitedFor(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100).virtual()
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeEvict)}
	c.untilPermitted(g, h)
	c.runs(h, "late", func(p *cluster.Pod) { p.Scheduled, p.Tolerates = c.Now, true })
	d := c.reconcile()
	g.Expect(d.Nodes[0].Blockers).To(BeEmpty())
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonRebooting), d.Nodes[0].Message)
	d, _ = c.run(400)
	g.Expect(c.evicted).To(BeEmpty())
	g.Expect(h.reboots).To(HaveLen(1))
	g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), "%+v", d.Nodes[0])
}

// TestAPodThatReturnsBeforeARebootDespiteTheTaintIsNamed, and evicted no more: another would come in its place.
func TestAPodThatReturnsBeforeARebootDespiteTheTaintIsNamed(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100).virtual()
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeEvict)}
	for !h.required {
		c.steps(1)
	}
	c.runs(h, "network", func(p *cluster.Pod) { p.Scheduled, p.Tolerates = c.Now, true })
	d := c.during(time.Minute, time.Second)
	g.Expect(c.evicted).To(BeEmpty())
	g.Expect(d.Nodes[0].Message).To(ContainSubstring("; pod user/network is not evicted, since it came in spite of the taint, as another would after it; scale its workload down"))
	c.during(10*time.Minute, time.Second)
	g.Expect(h.waits()).To(HavePrefix(v1alpha1.ReasonDrainTimedOut))
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.ready().Status).To(Equal(metav1.ConditionFalse))
}

// TestAReleasedNodeThatWaitsForItsPodsNamesThem, however long it waits: the agent has not failed.
func TestAReleasedNodeThatWaitsForItsPodsNamesThem(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100).virtual()
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeNever)}
	c.run(400)
	g.Expect(h.reboots).To(HaveLen(1))
	c.runs(h, "web")
	c.Policies = nil
	d := c.during(3*time.Hour, 10*time.Second)
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonGPUInUse), d.Nodes[0].Message)
	g.Expect(d.Nodes[0].Message).To(ContainSubstring("pod user/web (the node, which must be rebooted)"))
	g.Expect(h.Taints).To(BeEmpty())
	version := c.version["a"]
	c.during(3*time.Hour, 10*time.Second)
	g.Expect(c.version["a"]).To(Equal(version), "nothing is written again and again")
	c.end(h, "web")
	c.during(timing.Patience+10*time.Minute, time.Second)
	g.Expect(h.reboots).To(HaveLen(2))
	g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}), "it is back")
}

// TestNobodyIsSaidToBeEvictedOnceTheTimeForDrainingIsOver: the node waits until they are gone by themselves.
func TestNobodyIsSaidToBeEvictedOnceTheTimeForDrainingIsOver(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100).virtual()
	c.runs(h, "web")
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeEvict)}
	for !h.required {
		c.steps(1)
	}
	for range 120 {
		for _, a := range rollout.Decide(c.world()).Actions {
			if _, evicts := a.(action.Evict); !evicts { // a PodDisruptionBudget refuses that
				c.do(a)
			}
		}
		c.tick(10 * time.Second)
	}
	g.Expect(h.waits()).To(HavePrefix(v1alpha1.ReasonDrainTimedOut))
	g.Expect(h.GPU.Status.Rollout.Blockers).To(ConsistOf(HaveField("Handling", "is waited for, however long: the time for draining is over, and the node takes new pods")))
}

// BenchmarkANodeOfManyPodsThatIsToBeEmpty: each of its pods that changes leads to a decision.
func BenchmarkANodeOfManyPodsThatIsToBeEmpty(b *testing.B) {
	c := newSite()
	h := c.add("a", sim.A100).virtual()
	for i := range 1000 {
		c.runs(h, fmt.Sprintf("web-with-a-long-name-%d", i))
	}
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeWaitForIdle)}
	for !h.required {
		c.steps(1)
	}
	s := c.world()
	for b.Loop() {
		rollout.Decide(s)
	}
}

// TestANewNodeOfKarpenterIsNotEmptied: the taint that this needs would make Karpenter start another one, for which the
// same holds.
func TestANewNodeOfKarpenterIsNotEmptied(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("a", sim.A100).virtual()
	h.Labels[cluster.LabelNodePool] = "gpus"
	c.runs(h, "web")
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeEvict)}
	for range 200 {
		c.steps(1)
		g.Expect(h.Taints).To(BeEmpty())
	}
	g.Expect(h.reboots).To(HaveLen(1))
	g.Expect(c.evicted).To(BeEmpty())

	h.Labels[cluster.LabelInitialized] = cluster.LabelTrue
	c.Policies = nil
	c.run(400)
	g.Expect(h.reboots).To(HaveLen(2))
	g.Expect(c.evicted).To(Equal([]string{"web"}), "it is in service")
}
