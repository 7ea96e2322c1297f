// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"cmp"
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// fleet is a cluster of nodes n0, n1, … with one GPU each, and a policy for them.
func fleet(nodes int, sharing v1alpha1.Sharing, with ...func(*v1alpha1.GPUSharingPolicy)) *site {
	c := newSite()
	for i := range nodes {
		c.add(fmt.Sprintf("n%d", i), sim.A100)
	}
	c.setPolicy("research", sharing, with...)
	return c
}

// setSharing changes the sharing of the policy.
func (c *site) setSharing(sharing v1alpha1.Sharing) {
	c.Policies[0].Spec.Sharing = sharing
	c.Policies[0].Generation++
}

// during reconciles so often for so long.
func (c *site) during(all, every time.Duration) (d rollout.Decision) {
	for range all / every {
		d = c.reconcile()
		c.tick(every)
	}
	return d
}

// TestASlotEnds: whatever becomes of the node that holds the only slot, another node gets it in time.
func TestASlotEnds(t *testing.T) {
	for name, test := range map[string]struct {
		sharing v1alpha1.Sharing
		strike  func(*site, *host)
		within  time.Duration // in which the others are changed; zero: some time after the deadline of the slot
	}{
		"when the machine dies before the agent was asked": {sharing: mig(count("3g", 2)), strike: func(c *site, h *host) {
			c.reconcile() // tainted
			h.AgentReady = false
		}},
		"when the machine dies while the agent is at work": {sharing: timeSlicing(4), strike: func(c *site, h *host) {
			c.reconcile()
			h.AgentReady = false
		}},
		"when the machine dies while NVIDIA's operands are stopped": {sharing: mig(count("3g", 2)), strike: func(c *site, h *host) {
			c.steps(1)
			c.reconcile()
			h.AgentReady = false
		}},
		"when the machine dies while the node is verified": {sharing: timeSlicing(4), strike: func(c *site, h *host) {
			h.breaks("")
			c.steps(5)
			h.AgentReady = false
		}},
		"when another controller rewrites the taint without its time, and a pod stays": {sharing: mig(count("3g", 2)), strike: func(c *site, h *host) {
			c.hold(h, "job", 0, gpu.WholeGPU)
			c.reconcile() // tainted
			for i := range h.Taints {
				h.Taints[i].TimeAdded = nil
			}
			c.version[h.Name]++
		}},
		"when the change fails": {sharing: timeSlicing(4), strike: func(_ *site, h *host) { h.breaks("") }},
		"when the change fails, and a pod keeps the node from being rolled back": {sharing: mig(count("3g", 2)), strike: func(c *site, h *host) {
			h.breaks("")
			c.steps(6)
			c.hold(h, "quick", 0, h.devices()[0].State.Instances[0].ID)
		}},
		"when the node becomes unsupported in the middle": {sharing: timeSlicing(4), within: 10 * time.Minute, strike: func(c *site, h *host) {
			h.breaks("")
			c.steps(10)
			h.Labels[optOutLabel] = "false"
		}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(3, test.sharing, failures(2))
			test.strike(c, c.hosts["n0"])
			d := c.during(cmp.Or(test.within, 3*time.Hour), 10*time.Second)
			g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(2)), "%+v", d.Nodes)
			g.Expect(c.hosts["n0"].Taints).To(BeEmpty())
			g.Expect(c.hosts["n0"].Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
		})
	}
}

// TestANodeThatReturnsIsChangedAnew: the time in which its machine was down is no failure of the change.
func TestANodeThatReturnsIsChangedAnew(t *testing.T) {
	for name, until := range map[string]func(*site){
		"tainted":   func(c *site) { c.reconcile() },
		"stopped":   func(c *site) { c.steps(1); c.reconcile() },
		"at work":   func(c *site) { c.steps(2); c.reconcile() },
		"applied":   func(c *site) { c.steps(3) },
		"selecting": func(c *site) { c.steps(4) },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(2, mig(count("3g", 2)))
			until(c)
			c.hosts["n0"].AgentReady = false
			d := c.during(2*time.Hour, 10*time.Second)
			g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(1)), "%+v", d.Nodes)
			c.hosts["n0"].AgentReady = true
			tries := 0
			c.hosts["n0"].hardware.Fail = func(op sim.Op, _ string) error {
				if tries++; op == sim.OpObserve || tries > 40 {
					return nil
				}
				return gpu.ErrBusy
			}
			for range 100 {
				g.Expect(c.reconcile().Nodes[0].State).NotTo(Equal(node.Failed))
				c.tick(time.Second)
				d = c.reconcile()
			}
			g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(2)), "%+v", d.Nodes)
			g.Expect(c.hosts["n0"].Annotations).NotTo(HaveKey(v1alpha1.AnnotationInterrupted))
		})
	}
}

// TestADeadMachineKeepsNoEditWaiting: the configuration that it never proved is not the first one of a later edit
// either.
func TestADeadMachineKeepsNoEditWaiting(t *testing.T) {
	g := NewWithT(t)
	c := fleet(10, timeSlicing(4), failures(10), unavailable("100%"))
	c.run(200)
	g.Expect(c.ready()).To(Equal(10))
	c.setSharing(timeSlicing(8))
	c.reconcile()
	c.hosts["n0"].AgentReady = false
	c.during(time.Hour, time.Minute)
	c.setSharing(timeSlicing(6))
	d := c.during(time.Hour, 10*time.Second)
	g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(9)), "%+v", d.Nodes)
}

// TestFailedNodesCountAgainstFailureThresholdOnly: with one slot as many nodes may fail as failureThreshold allows.
func TestFailedNodesCountAgainstFailureThresholdOnly(t *testing.T) {
	g := NewWithT(t)
	c := fleet(5, timeSlicing(4), failures(3))
	c.hosts["n1"].breaks("")
	c.hosts["n2"].breaks("")
	d := c.during(time.Hour, 10*time.Second)
	g.Expect(d.Policies["research"].Nodes.Failed).To(Equal(int32(2)))
	g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(3)), "%+v", d.Nodes)

	c = fleet(5, timeSlicing(4), failures(2))
	c.hosts["n1"].breaks("")
	c.hosts["n2"].breaks("")
	d = c.during(time.Hour, 10*time.Second)
	g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(1)), "halted: %+v", d.Nodes)
	g.Expect(d.Nodes[4].Reason).To(Equal(v1alpha1.ReasonRolloutHalted))
}

// TestADegradedNodeBlocksNobody: a node that lost a device after it was verified is reported, and others are changed.
func TestADegradedNodeBlocksNobody(t *testing.T) {
	for name, unavailable := range map[string]func(*v1alpha1.GPUSharingPolicy){
		"one at a time": unavailable("1"), "all at once": unavailable("100%"),
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(2, mig(count("1g", 7)), unavailable)
			c.run(300)
			g.Expect(c.ready()).To(Equal(2))
			sick := c.hosts["n0"]
			sick.Allocatable["nvidia.com/mig-1g.5gb"] = 3
			c.add("n2", sim.A100)
			c.add("other-kind", sim.H100)
			d := c.during(10*time.Minute, 10*time.Second)
			g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(3)), "%+v", d.Nodes)
			hasState(g, d, node.Degraded)
			hasReason(g, d, v1alpha1.ReasonNotAdvertised)
			hasMessage(g, d, "nvidia.com/mig-1g.5gb is 3 instead of 7")
			g.Expect(sick.Taints).To(BeEmpty())
		})
	}
}

// TestANodeIsRolledBackBeforeOthersAreChanged: its slot is not given to another node in between.
func TestANodeIsRolledBackBeforeOthersAreChanged(t *testing.T) {
	g := NewWithT(t)
	c := fleet(3, timeSlicing(2), failures(3))
	c.run(200)
	good := c.hosts["n0"].GPU.Spec.ConfigName
	c.hosts["n0"].breaks(good)
	c.setSharing(mig(count("3g", 2)))
	for range 600 {
		d := c.reconcile()
		if n := one(d); n.State == node.Failed && c.hosts["n0"].Labels[v1alpha1.LabelConfig] != good {
			g.Expect(c.hosts["n1"].GPU.Spec.ConfigName).To(Equal(good))
		}
		c.tick(time.Second)
	}
	g.Expect(c.hosts["n0"].Labels[v1alpha1.LabelConfig]).To(Equal(good))
	g.Expect(c.hosts["n1"].Labels[v1alpha1.LabelConfig]).NotTo(Equal(good))
}

// TestATaintEndsWhenTheAgentDies: nothing was asked of the agent yet, so the node takes pods again after the time for
// draining.
func TestATaintEndsWhenTheAgentDies(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.hold(h, "train", 0, gpu.WholeGPU)
	c.steps(3)
	g.Expect(h.Taints).NotTo(BeEmpty())
	h.AgentReady = false
	c.during(10*time.Minute, time.Minute)
	g.Expect(h.Taints).NotTo(BeEmpty(), "it may come back in the time for draining")
	c.during(10*time.Minute, time.Minute)
	g.Expect(h.Taints).To(BeEmpty())
}

// TestASlotIsFreeOnceTheSchedulingOfItsNodeIsRestored: both may be decided in one reconcile, in which the write that
// restores it may come last, or fail.
func TestASlotIsFreeOnceTheSchedulingOfItsNodeIsRestored(t *testing.T) {
	g := NewWithT(t)
	c := fleet(2, mig(count("3g", 2)))
	next, lost := c.hosts["n0"], c.hosts["n1"]
	next.Labels[optOutLabel] = "false"
	c.steps(1)
	g.Expect(c.changing()).To(Equal([]string{"n1"}))
	delete(next.Labels, optOutLabel)
	lost.AgentReady = false
	fails := 5
	for range 6 * 60 {
		for _, a := range c.memory.decide(c.world()).Actions {
			if fails--; !frees(a) || fails < 0 {
				c.do(a)
			}
			g.Expect(len(c.changing())).To(BeNumerically("<=", 1))
		}
		c.tick(10 * time.Second)
	}
	g.Expect(lost.Taints).To(BeEmpty())
	g.Expect(c.ready()).To(Equal(1), "it is its turn in the end")
}

// frees reports whether an action makes a node schedulable again.
func frees(a action.Action) bool {
	_, is := a.(action.Untaint)
	return is
}

// TestANodeThatItsStoppedOperandsProtectIsNotTaintedOnTop: they wait for no slot. A change of that node does.
func TestANodeThatItsStoppedOperandsProtectIsNotTaintedOnTop(t *testing.T) {
	g := NewWithT(t)
	c := fleet(2, mig(count("3g", 2)))
	c.run(300)
	g.Expect(c.ready()).To(Equal(2))
	protected, changes := c.hosts["n0"], c.hosts["n1"]
	protected.Labels[optOutLabel] = "false"
	c.setSharing(mig(count("1g", 7)))
	c.steps(1)
	g.Expect(c.changing()).To(Equal([]string{"n1"}))
	changes.lags = true
	delete(protected.Labels, optOutLabel)
	for _, label := range []string{pluginLabel, gfdLabel} {
		protected.Labels[label] = "paused-for-mig-change"
	}
	protected.Annotations[v1alpha1.AnnotationStopped] = pluginLabel + "," + gfdLabel
	c.version[protected.Name]++
	c.tick(time.Second)
	for round := range 100 {
		changes.lags = round < 30
		c.reconcile()
		g.Expect(len(c.changing())).To(BeNumerically("<=", 1))
		c.tick(time.Second)
	}
	g.Expect(c.ready()).To(Equal(2))
}

// TestANodeThatAnotherPolicyTookOverTakesPodsAgainAtTheDeadline: the agent does not end the change of the policy
// before, and the one that governs the node now holds its change back.
func TestANodeThatAnotherPolicyTookOverTakesPodsAgainAtTheDeadline(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	h := c.hosts["n0"]
	c.steps(1)
	h.lags = true
	for len(h.GPU.Spec.Devices) == 0 {
		c.steps(1)
	}
	g.Expect(c.changing()).To(Equal([]string{"n0"}))
	c.setPolicy("other", mig(count("1g", 7)), paused)
	d := c.reconcile()
	g.Expect(c.changing()).To(Equal([]string{"n0"}), "the agent may be at work")
	g.Expect(d.After).To(And(BeNumerically(">", 0), BeNumerically("<=", 30*time.Minute)))
	c.tick(d.After)
	c.run(10)
	g.Expect(c.changing()).To(BeEmpty())
}

// TestANodeOnItsWayBackTakesNoSlotOfAnotherPolicy: it is released by a policy that was deleted, and comes to another
// one, of which a node is changing already, in each moment of the release. It counts as the former policy's until it
// has no taint.
func TestANodeOnItsWayBackTakesNoSlotOfAnotherPolicy(t *testing.T) {
	for begun := range 8 {
		for released := range 8 {
			t.Run(fmt.Sprintf("%d/%d", begun+1, released), func(t *testing.T) {
				g := NewWithT(t)
				c := newSite()
				changing, moves := c.add("changing", sim.A100), c.add("moves", sim.A100)
				changing.Labels["pool"], moves.Labels["pool"] = "b", "a"
				c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("b", mig(count("3g", 2)), onPool("b")), policyOf("a", mps(4), onPool("a"))}
				changing.lags = true
				c.steps(begun + 1)
				g.Expect(c.changing()).To(ContainElement("changing"))
				c.Policies = c.Policies[:1]
				c.steps(released)
				moves.Labels["pool"] = "b"
				c.version["moves"]++
				for range 20 {
					for _, a := range changes(c.reconcile().Actions) {
						g.Expect(a.NodeName() == "moves" && a.For().Name == "b").To(BeFalse(), "%v", a)
					}
					c.tick(time.Second)
				}
				g.Expect(c.changing()).To(Equal([]string{"changing"}))
			})
		}
	}
}

// TestADrainThatEndedUnseenIsRecordedAsFailed: no controller ran while the time for draining and the slot ended.
// Without the record the node would take the next slot again, and no other node had its turn.
func TestADrainThatEndedUnseenIsRecordedAsFailed(t *testing.T) {
	g := NewWithT(t)
	c := fleet(2, mig(count("3g", 2)), failures(3))
	c.hold(c.hosts["n0"], "train", 0, gpu.WholeGPU)
	c.steps(3)
	g.Expect(c.changing()).To(Equal([]string{"n0"}))
	c.tick(time.Hour)
	d := c.during(5*time.Minute, time.Second)
	hasReason(g, d, v1alpha1.ReasonDrainTimedOut)
	g.Expect(c.hosts["n0"].Taints).To(BeEmpty())
	isUpToDate(g, d.Nodes[1])
}
