// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	kstatus "sigs.k8s.io/cli-utils/pkg/kstatus/status"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// kstatusOf is what Flux, Argo CD and kpt conclude from a policy with the status that was decided.
func kstatusOf(t *testing.T, p v1alpha1.GPUSharingPolicy, s v1alpha1.GPUSharingPolicyStatus) kstatus.Status {
	t.Helper()
	g := NewWithT(t)
	p.TypeMeta, p.Status = metav1.TypeMeta{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "GPUSharingPolicy"}, s
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&p)
	g.Expect(err).NotTo(HaveOccurred())
	result, err := kstatus.Compute(&unstructured.Unstructured{Object: content})
	g.Expect(err).NotTo(HaveOccurred())
	return result.Status
}

// TestKstatusOfEachState brings the only node of a policy into each state of the state table, and asks kstatus how the
// policy is doing.
func TestKstatusOfEachState(t *testing.T) {
	for state, c := range map[node.State]struct {
		situation func() *site
		want      kstatus.Status
	}{
		node.Unknown: {func() *site { c, h := toMIG(); h.AgentReady = false; return c }, kstatus.InProgressStatus},
		node.Unsupported: {func() *site {
			c, _ := toMIG(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g.99gb", 1)) })
			return c
		}, kstatus.FailedStatus},
		node.PendingNonDisruptive: {func() *site {
			c, _ := toMIG(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = timeSlicing(4) })
			return c
		}, kstatus.InProgressStatus},
		node.PendingDisruptive: {func() *site { c, _ := toMIG(); return c }, kstatus.InProgressStatus},
		node.Draining: {func() *site {
			c, h := toMIG()
			c.hold(h, "train", 1, gpu.WholeGPU)
			c.reconcile()
			c.tick(time.Minute)
			return c
		}, kstatus.InProgressStatus},
		node.StoppingOperands: {func() *site { c, _ := toMIG(); c.steps(1); return c }, kstatus.InProgressStatus},
		node.Idle:             {func() *site { c, _ := toMIG(); c.steps(2); return c }, kstatus.InProgressStatus},
		node.Applying:         {func() *site { c, _ := toMIG(); c.steps(2); c.reconcile(); return c }, kstatus.InProgressStatus},
		node.Selecting:        {func() *site { c, _ := slicing(); c.steps(3); return c }, kstatus.InProgressStatus},
		node.Verifying:        {func() *site { c, _ := slicing(); c.steps(3); c.reconcile(); return c }, kstatus.InProgressStatus},
		node.Finishing: {func() *site {
			c, _ := toMIG()
			for range 60 {
				if rollout.Decide(c.world()).Nodes[0].State == node.Finishing {
					break
				}
				c.steps(1)
			}
			return c
		}, kstatus.InProgressStatus},
		node.Failed: {func() *site { // and rolled back
			c, h := slicing()
			c.run(60)
			h.breaks(h.GPU.Spec.ConfigName)
			c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
			c.run(400)
			return c
		}, kstatus.FailedStatus},
		node.Degraded: {func() *site {
			c, h := slicing()
			c.run(60)
			h.Allocatable["nvidia.com/gpu"] = 1
			return c
		}, kstatus.InProgressStatus},
		node.UpToDate: {func() *site { c, _ := slicing(); c.run(60); return c }, kstatus.CurrentStatus},
	} {
		t.Run(string(state), func(t *testing.T) {
			g := NewWithT(t)
			cl := c.situation()
			d := rollout.Decide(cl.world())
			g.Expect(one(d).State).To(Equal(state), one(d).Message)
			sane(g, d.Policies["research"], cl.Policies[0].Generation)
			g.Expect(kstatusOf(t, cl.Policies[0], d.Policies["research"])).To(Equal(c.want), "%+v", d.Policies["research"].Conditions)
			for _, a := range d.Actions {
				cl.do(a)
			}
			node := cl.hosts[one(d).Node].kstatus(t)
			g.Expect(node).To(Or(Equal(c.want), Equal(kstatus.InProgressStatus)), "%+v", cl.hosts[one(d).Node].GPU.Status.Conditions)
			if c.want != kstatus.InProgressStatus {
				g.Expect(node).To(Equal(c.want))
			}
			cl.Policies[0].Generation++
			g.Expect(kstatusOf(t, cl.Policies[0], d.Policies["research"])).To(Equal(kstatus.InProgressStatus), "of an edit that nobody has seen")
		})
	}
}

// TestKstatusOfAPolicyThatWaits: what ends by itself is in progress, what needs a change has failed.
func TestKstatusOfAPolicyThatWaits(t *testing.T) {
	twoNodes := func(change ...func(*v1alpha1.GPUSharingPolicy)) *site {
		c, _ := toMIG(change...)
		c.add("b", sim.A100)
		return c
	}
	for name, c := range map[string]struct {
		situation func() *site
		reason    string // of Ready
		want      kstatus.Status
	}{
		"for the budget":        {func() *site { c := twoNodes(); c.reconcile(); return c }, v1alpha1.ReasonProgressing, kstatus.InProgressStatus},
		"for a window":          {func() *site { c, _ := toMIG(inWindows(tonight)); c.at("2027-03-01T12:00:00Z"); return c }, v1alpha1.ReasonOutsideWindow, kstatus.InProgressStatus},
		"for nobody's pod":      {func() *site { c, h := toMIG(neverEvicting); c.hold(h, "train", 1, gpu.WholeGPU); return c }, v1alpha1.ReasonGPUInUse, kstatus.InProgressStatus},
		"for its user":          {func() *site { c, _ := toMIG(paused); return c }, v1alpha1.ReasonPaused, kstatus.InProgressStatus},
		"for the ClusterPolicy": {func() *site { c, _ := toMIG(); c.Plugin.Ready = false; return c }, v1alpha1.ReasonConfiguringDevicePlugin, kstatus.InProgressStatus},
		"for other nodes":       {func() *site { c, h := toMIG(); h.Labels["pool"] = "x"; return elsewhere(c) }, v1alpha1.ReasonNoMatchingNodes, kstatus.FailedStatus},
		"for nodes of an autoscaler": {func() *site {
			c, h := toMIG(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Autoscaling.EmptyPool = v1alpha1.EmptyPoolExpected })
			h.Labels["pool"] = "x"
			return elsewhere(c)
		}, v1alpha1.ReasonNoMatchingNodes, kstatus.CurrentStatus},
		"for an edit of its windows, with its nodes as desired": {func() *site {
			c, _ := slicing()
			c.run(60)
			c.edit(inWindows(window("0 0 30 2 *", "1h")))
			return c
		}, v1alpha1.ReasonInvalidWindow, kstatus.FailedStatus},
		"for an agent on a node that its gpuSelector may select": {func() *site {
			c, _ := slicing()
			c.Policies[0].Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"NVIDIA-A100-SXM4-40GB"}}
			c.run(60)
			c.add("b", sim.A100).GPU.Status.Devices = nil
			return c
		}, v1alpha1.ReasonAgentNotReporting, kstatus.InProgressStatus},
		"for an edit of its windows": {func() *site {
			c, _ := toMIG(inWindows(window("0 0 30 2 *", "1h")))
			return c
		}, v1alpha1.ReasonInvalidWindow, kstatus.FailedStatus},
		"for the roll back of a node that failed": {func() *site {
			c, h := slicing()
			c.run(60)
			h.breaks(h.GPU.Spec.ConfigName)
			c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
			for range 400 {
				d := c.reconcile()
				c.tick(time.Second)
				if one(d).State == node.Failed {
					break
				}
			}
			return c
		}, v1alpha1.ReasonNotAdvertised, kstatus.InProgressStatus},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := c.situation()
			s := rollout.Decide(cl.world()).Policies["research"]
			g.Expect(s.Conditions).To(ContainElement(And(HaveField("Type", v1alpha1.ConditionReady), HaveField("Reason", c.reason))))
			g.Expect(kstatusOf(t, cl.Policies[0], s)).To(Equal(c.want), "%+v", s.Conditions)
		})
	}
	t.Run("for a decision", func(t *testing.T) {
		g := NewWithT(t)
		cl, _ := slicing()
		cl.run(60)
		cl.Policies[0].Status = rollout.Decide(cl.world()).Policies["research"]
		s := rollout.Undecided(cl.Policies, "Waiting for the cache", cl.Now)["research"]
		g.Expect(kstatusOf(t, cl.Policies[0], s)).To(Equal(kstatus.InProgressStatus), "%+v", s.Conditions)
	})
}

func elsewhere(c *site) *site {
	c.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "none"}}
	return c
}

// TestAPolicyOfAnEarlierVersionCanBeReportedAsUndecided: its status may list 32 nodes, and the API server refuses more
// than ten now.
func TestAPolicyOfAnEarlierVersionCanBeReportedAsUndecided(t *testing.T) {
	g := NewWithT(t)
	p := policyOf("research", timeSlicing(4))
	p.Status.Pending = make([]v1alpha1.PendingNode, 32)
	s := rollout.Undecided([]v1alpha1.GPUSharingPolicy{p}, "Waiting for the cache", newSite().Now)["research"]
	g.Expect(len(s.Pending)).To(BeNumerically("<=", v1alpha1.MostPending))
}

// TestAPolicyOfAnEarlierVersionIsNotTakenForObserved: its status has no observedGeneration, only its conditions have.
func TestAPolicyOfAnEarlierVersionIsNotTakenForObserved(t *testing.T) {
	g := NewWithT(t)
	c, _ := slicing()
	c.run(60)
	p := &c.Policies[0]
	p.Status = rollout.Decide(c.world()).Policies["research"]
	p.Status.ObservedGeneration = 0
	retaining(p)
	p.Generation++
	s := rollout.Decide(c.world()).Policies["research"]
	g.Expect(s.ObservedGeneration).To(BeEquivalentTo(1))
	g.Expect(kstatusOf(t, *p, s)).To(Equal(kstatus.InProgressStatus), "the release is not recorded yet")
}

// TestOfFortyNodesTheWorstTenAreListed: a failed one, two unsupported ones, two blocked ones, and the first of those
// that wait.
func TestOfFortyNodesTheWorstTenAreListed(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	for i := range 35 {
		c.add(fmt.Sprintf("a%02d", i), sim.A100)
	}
	for _, name := range []string{"busy", "lost"} {
		c.add(name, sim.A100)
	}
	c.hold(c.hosts["busy"], "train", 0, gpu.WholeGPU)
	c.hosts["lost"].AgentReady = false
	for _, name := range []string{"t4-1", "t4-2"} {
		c.add(name, sim.T4)
	}
	c.add("worst", sim.A100)
	c.setPolicy("research", mig(count("1g", 7)), neverEvicting, failures(2))
	g.Expect(rollout.Decide(c.world()).Nodes).To(HaveLen(40))
	all := c.Policies[0].Spec.NodeSelector
	c.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"first": "true"}}
	c.hosts["worst"].Labels["first"] = "true"
	c.steps(2)
	c.reconcile()
	c.hosts["worst"].GPU.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonLayoutDoesNotFit,
		Message: "no room", ObservedGeneration: c.hosts["worst"].GPU.Generation,
	}}
	c.Policies[0].Spec.NodeSelector = all
	s := rollout.Decide(c.world()).Policies["research"]
	var listed []string
	for _, p := range s.Pending {
		listed = append(listed, fmt.Sprintf("%s %s (%s)", p.NodeName, p.Reason, p.State))
		g.Expect(p.Message).NotTo(BeEmpty())
	}
	g.Expect(listed).To(HaveExactElements(
		"worst LayoutDoesNotFit (Failed)", "t4-1 MIGNotSupported (Unsupported)", "t4-2 MIGNotSupported (Unsupported)",
		"busy GPUInUse (PendingDisruptive)", "lost AgentNotReporting (Unknown)",
		HavePrefix("a00 "), HavePrefix("a01 "), HavePrefix("a02 "), HavePrefix("a03 "), HavePrefix("a04 "),
	))
	g.Expect(s.Nodes).To(Equal(v1alpha1.NodeCounts{Matched: 40, Failed: 3, Waiting: 37, Blocked: 2}))
	sane(g, s, c.Policies[0].Generation)
}

// TestUpdatedNodesAreNotAllReady: a node whose device plugin has lost a replica has the configuration, and is not
// ready.
func TestUpdatedNodesAreNotAllReady(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.add("b", sim.T4)
	counts := func() v1alpha1.NodeCounts { return rollout.Decide(c.world()).Policies["research"].Nodes }
	g.Expect(counts()).To(Equal(v1alpha1.NodeCounts{Matched: 2, Waiting: 2}))
	c.run(60)
	g.Expect(counts()).To(Equal(v1alpha1.NodeCounts{Matched: 2, Ready: 2, Updated: 2}))
	h.Allocatable["nvidia.com/gpu"]--
	g.Expect(counts()).To(Equal(v1alpha1.NodeCounts{Matched: 2, Ready: 1, Waiting: 1, Updated: 2, Blocked: 1}))
}

// TestTheStrategyOfANode is that of the devices in its spec: after a roll back that of the last good state.
func TestTheStrategyOfANode(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.Policies[0].Spec.Sharing = timeSlicing(4)
	c.run(60)
	g.Expect(h.GPU.Spec.Strategy).To(Equal(v1alpha1.StrategyTimeSlicing))
	h.breaks(h.GPU.Spec.ConfigName)
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("1g", 7)), 2
	c.steps(3)
	g.Expect(h.GPU.Spec.Strategy).To(Equal(v1alpha1.StrategyMIG))
	d, _ := c.run(400)
	isFailed(g, d)
	g.Expect(h.GPU.Spec.Strategy).To(Equal(v1alpha1.StrategyTimeSlicing))
	c.Policies = nil
	c.run(60)
	isForgotten(g, h)
}

// TestANodeThatLacksAGPUAndIsBeingChangedIsNotBlocked: the change goes on for the other GPUs.
func TestANodeThatLacksAGPUAndIsBeingChangedIsNotBlocked(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100, sim.A100)
	c.setPolicy("research", mig(count("3g.20gb", 2)), onGPUs(0, 1))
	c.run(300)
	c.loseGPU(h, 0)
	c.run(300)
	c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g", 7)) })
	for range 100 {
		d := c.reconcile()
		g.Expect(d.Policies["research"].Nodes.Blocked).To(BeZero(), "%s: %s", one(d).State, one(d).Message)
		c.tick(time.Second)
	}
	g.Expect(c.ready()).To(Equal(1))
}
