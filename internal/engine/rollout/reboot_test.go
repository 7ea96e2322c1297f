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

// firstGPU asks for MIG on the first GPU of a node alone.
func firstGPU() v1alpha1.Sharing {
	sharing := mig(count("1g", 7))
	sharing.MIG.Layouts[0].GPUs = &v1alpha1.GPUMatch{Indexes: []int32{0}}
	return sharing
}

// rebooting is a policy that lets nodes be rebooted.
func rebooting(mode v1alpha1.DrainMode) v1alpha1.GPUSharingPolicy {
	return policyOf("research", firstGPU(), func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Rollout.Reboot = v1alpha1.RebootModeIfRequired
		p.Spec.Rollout.Drain.Mode = mode
	})
}

func TestANodeIsRebootedWhereAGPUCannotBeReset(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100)
	h.virtual()
	c.hold(h, "train", 1, gpu.WholeGPU)
	c.Policies = []v1alpha1.GPUSharingPolicy{rebooting(v1alpha1.DrainModeEvict)}
	for range 60 {
		c.reconcile()
		c.tick(time.Second)
		if h.required {
			break
		}
		g.Expect(c.evicted).To(BeEmpty(), "the other GPU is not concerned before it is known that a reboot is needed")
	}
	d := c.reconcile()
	g.Expect(one(d).Plan).To(And(ContainElement(HaveSuffix("reset, which enables MIG mode")), ContainElement("reboot the node")))
	hasMessage(g, d, "pod user/train (GPU 1)")
	d, states := c.run(400)
	g.Expect(c.evicted).To(Equal([]string{"train"}), "all GPUs are idle when the node goes down")
	g.Expect(h.reboots).To(HaveLen(1))
	g.Expect(states["a"]).To(ContainElements(node.Unknown, node.Selecting, node.UpToDate))
	isUpToDate(g, one(d))
	isOffered(g, h, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-1g.5gb": 7})
	g.Expect(h.GPU.Spec.Reboot).To(BeNil(), "the permission ends with the desired state that it was for")
	g.Expect(h.Taints).To(BeEmpty())

	c.Policies = nil
	d, _ = c.run(400)
	g.Expect(d.Nodes).To(BeEmpty(), "going back reboots too, as the last policy allowed: %+v", d.Nodes)
	g.Expect(h.reboots).To(HaveLen(2))
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
}

// TestNoRebootDestroysInstancesOfOtherGPUs: the agent makes only those of the GPUs that a policy selects.
func TestNoRebootDestroysInstancesOfOtherGPUs(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100)
	h.virtual()
	h.partitionedByHand()
	h.report()
	c.setPolicy("research", mig(count("1g", 7)), onGPUs(1), func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Rollout.Reboot = v1alpha1.RebootModeIfRequired
	})
	d := c.during(5*time.Minute, time.Second)
	g.Expect(h.required).To(BeTrue())
	g.Expect(h.reboots).To(BeEmpty())
	hasMessage(g, d, "that destroys the MIG instances of GPU 0, which the policy does not select")
	c.during(time.Hour, 10*time.Second)
	g.Expect(h.reboots).To(BeEmpty())
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.devices()[0].State.Instances).To(HaveLen(1))
}

// TestARebootSurvivesAnInterruptionAfterEveryAction lets the controller end after each action of the whole way.
func TestARebootSurvivesAnInterruptionAfterEveryAction(t *testing.T) {
	for cut := 1; ; cut++ {
		g := NewWithT(t)
		c, h := withGPUs(sim.A100, sim.A100)
		h.virtual()
		c.hold(h, "train", 1, gpu.WholeGPU)
		c.Policies = []v1alpha1.GPUSharingPolicy{rebooting(v1alpha1.DrainModeEvict)}
		done := 0
		for range 300 {
			for _, a := range rollout.Decide(c.world()).Actions {
				if done++; done == cut {
					break // what is left of the reconcile is not carried out
				}
				c.do(a)
			}
			c.tick(time.Second)
		}
		g.Expect(h.reboots).To(HaveLen(1), "ended after action %d", cut)
		g.Expect(rollout.Decide(c.world()).Nodes[0].State).To(Equal(node.UpToDate))
		if done < cut {
			g.Expect(cut).To(BeNumerically(">", 8))
			return
		}
	}
}

func TestNoNodeIsRebootedTwiceForOneDesiredState(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100)
	h.virtual()
	h.forgets = true
	c.Policies = []v1alpha1.GPUSharingPolicy{rebooting(v1alpha1.DrainModeEvict)}
	d, _ := c.run(2000)
	g.Expect(h.reboots).To(HaveLen(1))
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonRebootInVain)
	g.Expect(one(d).Message).To(And(ContainSubstring("rebooted in vain"), HaveSuffix("; rolled back: edit the policy, or "+retryA)))
	g.Expect(h.devices()[0].PendingMIG).To(BeFalse(), "what was asked of the GPU is taken back")
	isOffered(g, h, gpusOnly(2))
	g.Expect(h.Taints).To(BeEmpty())
	c.tick(time.Hour)
	c.run(100)
	g.Expect(h.reboots).To(HaveLen(1))

	h.forgets = false
	c.Policies[0].Spec.Sharing.MIG.Layouts[0].Fill, c.Policies[0].Generation = "", 2
	c.Policies[0].Spec.Sharing.MIG.Layouts[0].Instances = []v1alpha1.MIGInstances{count("2g", 3)}
	d, _ = c.run(400)
	g.Expect(h.reboots).To(HaveLen(2), "another desired state is another reboot")
	isUpToDate(g, one(d))
}

func TestWhatANodeThatMustNotBeRebootedSays(t *testing.T) {
	for name, tt := range map[string]struct {
		forbid func(*v1alpha1.GPUSharingPolicy, *host)
		allow  func(*v1alpha1.GPUSharingPolicy, *host)
		says   string
	}{
		"by the policy": {
			forbid: func(p *v1alpha1.GPUSharingPolicy, _ *host) { p.Spec.Rollout.Reboot = v1alpha1.RebootModeNever },
			allow:  func(p *v1alpha1.GPUSharingPolicy, _ *host) { p.Spec.Rollout.Reboot = v1alpha1.RebootModeIfRequired },
			says:   "the policy does not let the operator do it (rollout.reboot: Never): set it to IfRequired",
		},
		"by its agent": {
			forbid: func(_ *v1alpha1.GPUSharingPolicy, h *host) { h.canReboot = false },
			allow:  func(_ *v1alpha1.GPUSharingPolicy, h *host) { h.canReboot = true },
			says:   "but its agent cannot: let it, as it says",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100, sim.A100)
			h.virtual()
			c.hold(h, "train", 1, gpu.WholeGPU)
			c.Policies = []v1alpha1.GPUSharingPolicy{rebooting(v1alpha1.DrainModeEvict)}
			tt.forbid(&c.Policies[0], h)
			d, _ := c.run(30)
			hasState(g, d, node.Applying)
			hasReason(g, d, v1alpha1.ReasonRebootRequired)
			hasMessage(g, d, tt.says)

			c.tick(15 * time.Minute)
			d, _ = c.run(100)
			isFailed(g, d)
			hasReason(g, d, v1alpha1.ReasonRebootRequired)
			hasMessage(g, d, tt.says)
			g.Expect(h.devices()[0].PendingMIG).To(BeFalse())
			g.Expect(c.evicted).To(BeEmpty(), "nobody is evicted for a reboot that does not come")
			g.Expect(h.reboots).To(BeEmpty())

			tt.allow(&c.Policies[0], h)
			c.Policies[0].Generation++
			c.tick(time.Second)
			d, _ = c.run(400)
			g.Expect(h.reboots).To(HaveLen(1), "once it is allowed the same desired state is tried again")
			isUpToDate(g, one(d))
		})
	}
}

func TestARebootWaitsForWhoMustNotBeEvicted(t *testing.T) {
	for _, mode := range []v1alpha1.DrainMode{v1alpha1.DrainModeNever, v1alpha1.DrainModeWaitForIdle} {
		t.Run(string(mode), func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100, sim.A100)
			h.virtual()
			c.hold(h, "train", 1, gpu.WholeGPU)
			c.Policies = []v1alpha1.GPUSharingPolicy{rebooting(mode)}
			d, _ := c.run(1500)
			g.Expect(h.reboots).To(BeEmpty())
			g.Expect(c.evicted).To(BeEmpty())
			hasMessage(g, d, "pod user/train (GPU 1)")
			g.Expect(h.Taints).To(BeEmpty(), "the node is not held out for ever")
			g.Expect(h.Labels[pluginLabel]).To(Equal("true"))

			c.end(h, "train")
			c.tick(time.Minute)
			d, _ = c.run(400)
			g.Expect(h.reboots).To(HaveLen(1))
			isUpToDate(g, one(d))
		})
	}
}

func TestRebootsKeepToTheBudget(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	for i := range 4 {
		c.add(fmt.Sprintf("n%d", i), sim.A100).virtual()
	}
	c.Policies = []v1alpha1.GPUSharingPolicy{rebooting(v1alpha1.DrainModeEvict)}
	for range 1500 {
		c.reconcile()
		c.tick(time.Second)
		down := 0
		for _, h := range c.hosts {
			if !h.AgentReady {
				down++
			}
		}
		g.Expect(down).To(BeNumerically("<=", 1))
	}
	for _, h := range c.hosts {
		g.Expect(h.reboots).To(HaveLen(1))
	}
}

// TestAPausedRolloutKeepsNoNodeThatAwaitsItsReboot: the agent can do no more before the reboot, which the pause holds
// back. So the node takes pods again meanwhile, and NVIDIA's operands run; afterwards the change goes on.
func TestAPausedRolloutKeepsNoNodeThatAwaitsItsReboot(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.virtual()
	c.Policies = []v1alpha1.GPUSharingPolicy{rebooting(v1alpha1.DrainModeEvict)}
	for !h.required {
		c.steps(1)
	}
	c.Policies[0].Spec.Rollout.Paused = true
	c.run(60)
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
	isOffered(g, h, gpusOnly(1))
	g.Expect(h.reboots).To(BeEmpty())
	c.Policies[0].Spec.Rollout.Paused = false
	c.settles(g, 400)
	g.Expect(h.reboots).To(HaveLen(1))
}

// TestARollBackToMPSThatNeedsARebootIsLeftToItsUsers: the daemon of several GPUs cannot start before the reboot either.
func TestARollBackToMPSThatNeedsARebootIsLeftToItsUsers(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100)
	h.virtual()
	c.setPolicy("research", mps(4))
	c.run(60)
	g.Expect(h.daemons).To(HaveLen(1))
	h.breaks(h.Labels[v1alpha1.LabelConfig]) // what the GPUs offer in their new mode is not advertised
	c.edit(func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Sharing, p.Spec.Rollout.Reboot = mig(count("2g", 3)), v1alpha1.RebootModeIfRequired
	})
	for !h.devices()[0].State.MIG {
		c.steps(1)
	}
	c.Policies[0].Spec.Rollout.Reboot = v1alpha1.RebootModeNever
	c.during(30*time.Minute, time.Second)
	version := c.version["a"]
	d := c.during(2*time.Hour, 10*time.Second)
	isFailed(g, d)
	hasMessage(g, d, "Reboot the node, or set rollout.reboot to IfRequired")
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(c.version["a"]).To(Equal(version), "nothing is written again and again")
}

// TestANodeThatWaitsForARebootOfAnotherPolicyTakesPodsAgain: the policy that governs it now holds its change back, and
// the agent can do no more for the one before.
func TestANodeThatWaitsForARebootOfAnotherPolicyTakesPodsAgain(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.virtual()
	first := rebooting(v1alpha1.DrainModeEvict)
	first.Spec.Rollout.Reboot = v1alpha1.RebootModeNever
	c.Policies = []v1alpha1.GPUSharingPolicy{first}
	for !h.required {
		c.steps(1)
	}
	c.steps(2)
	g.Expect(h.Taints).NotTo(BeEmpty())
	c.setPolicy("other", mig(count("2g", 3)), paused)
	d, _ := c.run(60)
	hasReason(g, d, v1alpha1.ReasonPaused)
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
}

// TestANodeThatOnlyARebootBringsBackIsLeftToItsUsers: the way back needs a reboot that the operator does not make. So
// the node takes pods again, NVIDIA's operands run, nothing is written to the Node any more, and a message names what
// helps.
func TestANodeThatOnlyARebootBringsBackIsLeftToItsUsers(t *testing.T) {
	never := func(c *site, _ *host) {
		c.Policies[0].Spec.Rollout.Reboot = v1alpha1.RebootModeNever
		c.Policies[0].Generation++
		c.run(60)
	}
	remove := func(c *site, _ *host) { c.Policies = nil }
	for name, tt := range map[string]struct {
		back func(*site, *host)
		says string
	}{
		"after the policy": {func(c *site, h *host) { never(c, h); remove(c, h) }, "The last policy did not let the operator reboot the node"},
		"after the policy, without an agent that can": {func(c *site, h *host) { h.canReboot = false; remove(c, h) }, "but the agent cannot"},
		"after the policy, in vain":                   {func(c *site, h *host) { h.forgets = true; remove(c, h) }, "rebooted in vain"},
		"after a failure":                             {never, "Reboot the node, or set rollout.reboot to IfRequired"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			h.virtual()
			c.Policies = []v1alpha1.GPUSharingPolicy{rebooting(v1alpha1.DrainModeEvict)}
			if name == "after a failure" {
				h.breaks("") // what the GPU offers in its new mode is not advertised
			}
			for !h.devices()[0].State.MIG {
				c.steps(1)
			}
			tt.back(c, h)
			c.run(4000)
			reboots := len(h.reboots)
			version := c.version["a"]
			d, _ := c.run(4000)
			g.Expect(d.Nodes).To(HaveLen(1))
			isFailed(g, d)
			hasMessage(g, d, tt.says)
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
			g.Expect(c.version["a"]).To(Equal(version), "nothing is written again and again")
			g.Expect(h.reboots).To(HaveLen(reboots))
		})
	}
}

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
			c, h := withGPUs(sim.A100, sim.A100)
			h.virtual()
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
			isUpToDate(g, one(d))
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
			c, h := withGPUs(sim.A100)
			h.virtual()
			c.besides(h)
			c.Policies = []v1alpha1.GPUSharingPolicy{emptying(mode)}
			for !h.required {
				c.steps(1)
			}
			d := rollout.Decide(c.world())
			g.Expect(one(d).Plan).To(ContainElement("reboot the node"))
			var lines []string
			for _, b := range one(d).Blockers {
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
			c, h := withGPUs(sim.A100)
			h.virtual()
			c.runs(h, "web")
			c.Policies = []v1alpha1.GPUSharingPolicy{emptying(mode)}
			d, _ := c.run(1500)
			g.Expect(h.reboots).To(BeEmpty())
			g.Expect(c.evicted).To(BeEmpty())
			g.Expect(one(d).Reason).To(Equal(reason))
			hasMessage(g, d, "pod user/web (the node, which must be rebooted)")
			g.Expect(h.Taints).To(BeEmpty(), "the node is not held out for ever")
			g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
			version := c.version["a"]
			c.during(2*time.Hour, 10*time.Second)
			g.Expect(c.version["a"]).To(Equal(version), "nothing is written again and again")

			c.end(h, "web")
			c.tick(time.Minute)
			d, _ = c.run(400)
			g.Expect(h.reboots).To(HaveLen(1))
			isUpToDate(g, one(d))
		})
	}
}

// TestTheTimeForDrainingANodeBeforeItsRebootBeginsInAWindow: what a window that closes leaves undone, the next one has
// its whole time for.
func TestTheTimeForDrainingANodeBeforeItsRebootBeginsInAWindow(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.virtual()
	c.runs(h, "web")
	p := emptying(v1alpha1.DrainModeWaitForIdle)
	inWindows(tonight)(&p)
	c.Policies = []v1alpha1.GPUSharingPolicy{p}
	c.at("2027-03-02T01:55:00Z")
	d := c.during(4*time.Minute, time.Second)
	hasState(g, d, node.Draining)
	c.at("2027-03-02T02:00:00Z")
	d = c.during(time.Hour, 10*time.Second)
	hasReason(g, d, v1alpha1.ReasonOutsideWindow)
	g.Expect(h.Taints).To(BeEmpty(), "the node takes pods meanwhile")
	c.at("2027-03-02T22:00:00Z")
	d = c.during(9*time.Minute, time.Second)
	hasState(g, d, node.Draining)
	c.end(h, "web")
	c.run(400)
	g.Expect(h.reboots).To(HaveLen(1))
	g.Expect(c.ready()).To(Equal(1))
}

// TestAPodThatComesOnceARebootIsPermittedIsNotWaitedFor: the agent may be rebooting the node already.
func TestAPodThatComesOnceARebootIsPermittedIsNotWaitedFor(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.virtual()
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeEvict)}
	c.untilPermitted(g, h)
	c.runs(h, "late", func(p *cluster.Pod) { p.Scheduled, p.Tolerates = c.Now, true })
	d := c.reconcile()
	g.Expect(one(d).Blockers).To(BeEmpty())
	hasReason(g, d, v1alpha1.ReasonRebooting)
	d, _ = c.run(400)
	g.Expect(c.evicted).To(BeEmpty())
	g.Expect(h.reboots).To(HaveLen(1))
	isUpToDate(g, one(d))
}

// TestAPodThatReturnsBeforeARebootDespiteTheTaintIsNamed, and evicted no more: another would come in its place.
func TestAPodThatReturnsBeforeARebootDespiteTheTaintIsNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.virtual()
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeEvict)}
	for !h.required {
		c.steps(1)
	}
	c.runs(h, "network", func(p *cluster.Pod) { p.Scheduled, p.Tolerates = c.Now, true })
	d := c.during(time.Minute, time.Second)
	g.Expect(c.evicted).To(BeEmpty())
	hasMessage(g, d, "; pod user/network is not evicted, since it came in spite of the taint, as another would after it; scale its workload down")
	c.during(10*time.Minute, time.Second)
	g.Expect(h.waits()).To(HavePrefix(v1alpha1.ReasonDrainTimedOut))
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.ready().Status).To(Equal(metav1.ConditionFalse))
}

// TestAReleasedNodeThatWaitsForItsPodsNamesThem, however long it waits: the agent has not failed.
func TestAReleasedNodeThatWaitsForItsPodsNamesThem(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.virtual()
	c.Policies = []v1alpha1.GPUSharingPolicy{emptying(v1alpha1.DrainModeNever)}
	c.run(400)
	g.Expect(h.reboots).To(HaveLen(1))
	c.runs(h, "web")
	c.Policies = nil
	d := c.during(3*time.Hour, 10*time.Second)
	hasReason(g, d, v1alpha1.ReasonGPUInUse)
	hasMessage(g, d, "pod user/web (the node, which must be rebooted)")
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
	c, h := withGPUs(sim.A100)
	h.virtual()
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
	c, h := withGPUs(sim.A100)
	h.virtual()
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
	c, h := withGPUs(sim.A100)
	h.virtual()
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
