// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// limited is time-slicing whose memory the driver is to limit.
func limited(share string) v1alpha1.Sharing {
	s := timeSlicing(4)
	s.TimeSlicing.Memory = &v1alpha1.TimeSlicedMemory{Limit: v1alpha1.MemoryLimitEnforce, PerReplica: new(resource.MustParse(share))}
	return s
}

// TestTheMemoryGuardReachesNodesWithoutDisruption: the spec of the GPUNodes alone changes, and what the node advertises
// stays.
func TestTheMemoryGuardReachesNodesWithoutDisruption(t *testing.T) {
	g := NewWithT(t)
	c := fleet(2, timeSlicing(4))
	c.run(60)
	before := *c.hosts["n0"].GPU.Spec.DeepCopy()
	g.Expect(before.Memory).To(BeNil(), "off by default")

	guarded := timeSlicing(4)
	guarded.TimeSlicing.Memory = &v1alpha1.TimeSlicedMemory{
		PerReplica: new(resource.MustParse("4Gi")), Guard: v1alpha1.MemoryGuard{Mode: v1alpha1.MemoryGuardEvict},
	}
	c.setSharing(guarded)
	for range 30 {
		d := c.reconcile()
		for _, a := range d.Actions {
			g.Expect(a).To(Or(BeAssignableToTypeOf(action.SetSpec{}), BeAssignableToTypeOf(action.Report{})), "%v", a)
		}
		for _, n := range d.Nodes {
			g.Expect(n.State).To(Equal(node.UpToDate))
		}
	}
	for _, name := range []string{"n0", "n1"} {
		g.Expect(c.hosts[name].GPU.Spec.Memory).To(Equal(guarded.TimeSlicing.Memory))
	}
	after := *c.hosts["n0"].GPU.Spec.DeepCopy()
	after.Memory = nil
	g.Expect(after).To(Equal(before))

	c.setSharing(timeSlicing(4))
	c.run(30)
	g.Expect(c.hosts["n0"].GPU.Spec).To(Equal(before), "the guard goes with the policy's")
}

// TestMemoryLimitsReachNodesOneByOne, without disruption, and no further node once one does not read back. That one has none, like any change
// that failed, until it is tried again.
func TestMemoryLimitsReachNodesOneByOne(t *testing.T) {
	g := NewWithT(t)
	c := fleet(3, timeSlicing(4))
	c.run(60)
	shares := func() (all []string) {
		for _, name := range []string{"n0", "n1", "n2"} {
			if m := c.hosts[name].GPU.Spec.Memory; m.Limited() == v1alpha1.MemoryLimitEnforce {
				all = append(all, m.PerReplica.String())
			} else {
				all = append(all, "-")
			}
		}
		return all
	}
	var seen []string
	run := func(share string) (d rollout.Decision) {
		c.setSharing(limited(share))
		seen = nil
		for range 30 {
			d = c.reconcile()
			for _, a := range d.Actions {
				g.Expect(a).To(Or(BeAssignableToTypeOf(action.SetSpec{}), BeAssignableToTypeOf(action.Report{})), "%v", a)
			}
			if now := strings.Join(shares(), " "); !slices.Contains(seen, now) {
				seen = append(seen, now)
			}
			c.tick(time.Second)
		}
		return d
	}
	d := run("4Gi")
	g.Expect(seen).To(Equal([]string{"4Gi - -", "4Gi 4Gi -", "4Gi 4Gi 4Gi"}))
	g.Expect(d.Policies["research"].Nodes.Ready).To(BeEquivalentTo(3))

	c.hosts["n1"].unlimited = true
	d = run("5Gi")
	g.Expect(seen).To(Equal([]string{"5Gi 4Gi 4Gi", "5Gi 5Gi 4Gi", "5Gi - 4Gi"}))
	g.Expect(d.Nodes[1].State).To(Equal(node.Failed))
	g.Expect(d.Nodes[1].Reason).To(Equal(v1alpha1.ReasonNotEnforced))
	g.Expect(d.Nodes[1].Message).To(ContainSubstring("a memory limit did not read back as it was set: 0 pods are limited, not: 1 NotEnforced; rolled back"))
	g.Expect(d.Nodes[2].Reason).To(Equal(v1alpha1.ReasonRolloutHalted))
	is, _ := condition.Find(d.Policies["research"].Conditions, v1alpha1.ConditionStalled)
	g.Expect(is.Message).To(ContainSubstring("node n1: a memory limit did not read back"))

	c.hosts["n1"].unlimited = false
	c.hosts["n1"].annotate(v1alpha1.AnnotationRetry, "1")
	c.run(60)
	g.Expect(shares()).To(HaveEach("5Gi"), "tried again")
	c.hosts["n0"].unlimited = true // found later, as the first pod with a share comes
	c.tick(time.Second)
	c.run(5)
	g.Expect(shares()).To(Equal([]string{"-", "5Gi", "5Gi"}))
	c.setSharing(timeSlicing(4))
	d, _ = c.run(60)
	g.Expect(shares()).To(HaveEach("-"), "undone everywhere")
	g.Expect(d.Policies["research"].Nodes.Ready).To(BeEquivalentTo(3))
	g.Expect(c.hosts["n0"].GPU.Status.Rollout.Failed).To(BeNil())
}

// TestAnAgentThatReportsNoLimitsHoldsNobodyUp for long: it may be of an earlier version.
func TestAnAgentThatReportsNoLimitsHoldsNobodyUp(t *testing.T) {
	g := NewWithT(t)
	c := fleet(2, timeSlicing(4))
	c.run(60)
	c.hosts["n0"].lags = true
	c.setSharing(limited("4Gi"))
	c.run(30)
	g.Expect(c.hosts["n1"].GPU.Spec.Memory).To(BeNil())
	d, _ := c.run(60)
	g.Expect(c.hosts["n1"].GPU.Spec.Memory).NotTo(BeNil())
	g.Expect(d.Policies["research"].Nodes.Ready).To(BeEquivalentTo(2))
}

// TestAReleasedNodeHasNoMemoryGuard: its policy is deleted, and the node keeps what it has.
func TestAReleasedNodeHasNoMemoryGuard(t *testing.T) {
	g := NewWithT(t)
	guarded := timeSlicing(4)
	guarded.TimeSlicing.Memory = &v1alpha1.TimeSlicedMemory{Guard: v1alpha1.MemoryGuard{Mode: v1alpha1.MemoryGuardReport}}
	c := fleet(1, guarded, retaining)
	c.run(60)
	g.Expect(c.hosts["n0"].GPU.Spec.Memory).NotTo(BeNil())
	c.Policies = nil
	c.run(60)
	g.Expect(c.hosts["n0"].GPU.Spec.Memory).To(BeNil())
}

// TestWhatTheMemoryGuardReportsIsNotTheRollouts: another controller writes it, with a field manager of its own.
func TestWhatTheMemoryGuardReportsIsNotTheRollouts(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, timeSlicing(4))
	p := &c.Policies[0]
	p.Status.Conditions = append(p.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionMemoryPressure, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonContainerOverShare,
	})
	for _, s := range []v1alpha1.GPUSharingPolicyStatus{
		rollout.Decide(c.world()).Policies[p.Name], rollout.Undecided(c.Policies, "no", c.Now)[p.Name],
	} {
		_, found := condition.Find(s.Conditions, v1alpha1.ConditionMemoryPressure)
		g.Expect(found).To(BeFalse())
		_, found = condition.Find(s.Conditions, v1alpha1.ConditionReady)
		g.Expect(found).To(BeTrue())
	}
}

// TestTheAgentIsToldAtOnceWhoElseLimitsMemory, also while the node waits: it has limits, and must leave those of others alone. And when they have
// gone, or nothing asks for limits any more.
func TestTheAgentIsToldAtOnceWhoElseLimitsMemory(t *testing.T) {
	for name, wait := range map[string]func(c *site){
		"for a slot for another limit": func(c *site) {
			c.Policies[0].Spec.Rollout.Paused = true
			c.setSharing(limited("5Gi"))
		},
		"until its GPU is idle": func(c *site) {
			c.hold(c.hosts["n0"], "train", 0, gpu.WholeGPU)
			c.setSharing(mig(count("1g.5gb", 7)))
		},
		"and at rest":                           func(*site) {},
		"with a policy that cannot be honoured": func(c *site) { c.setSharing(mig(count("1g.77gb", 7))) },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(1, limited("4Gi"))
			c.run(60)
			g.Expect(c.hosts["n0"].GPU.Spec.Memory.Limited()).To(Equal(v1alpha1.MemoryLimitEnforce))
			wait(c)
			c.run(10)
			g.Expect(c.hosts["n0"].GPU.Spec.Memory.Limited()).To(Equal(v1alpha1.MemoryLimitEnforce))
			c.hosts["n0"].MemoryOwner = "gpu-fractioning"
			c.run(30)
			g.Expect(c.hosts["n0"].GPU.Spec.MemoryOwner).To(Equal("gpu-fractioning"))
			c.hosts["n0"].MemoryOwner = ""
			c.run(30)
			g.Expect(c.hosts["n0"].GPU.Spec.MemoryOwner).To(BeEmpty())
			c.hosts["n0"].MemoryOwner, c.hosts["n0"].Allocatable["nvidia.com/gpumem"] = "HAMi", 1000 // HAMi's own resource
			c.run(30)
			g.Expect(c.hosts["n0"].GPU.Spec.MemoryOwner).To(Equal("HAMi"))
			c.Policies[0].Spec.Rollout.Paused = false
			delete(c.hosts["n0"].Allocatable, "nvidia.com/gpumem")
			c.setSharing(timeSlicing(4))
			c.run(30)
			g.Expect(c.hosts["n0"].GPU.Spec.MemoryOwner).To(BeEmpty())
		})
	}
}

// TestALostBaselineBringsNoLimit to a node that is changing, while the rollout is held back: only a slot does.
func TestALostBaselineBringsNoLimit(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("1g.5gb", 7)))
	c.run(60)
	h := c.hosts["n0"]
	h.lags = true
	c.setSharing(timeSlicing(4))
	c.run(60)
	g.Expect(h.GPU.Spec.Devices).To(HaveEach(HaveField("Sharing.MIGMode", v1alpha1.MIGModeDisabled)), "asked for")
	c.Policies[0].Spec.Rollout.Paused = true
	c.setSharing(limited("4Gi"))
	c.run(10)
	g.Expect(h.GPU.Spec.Memory).To(BeNil())
	baseline := h.GPU.Spec.Baseline
	h.GPU.Spec.Baseline = nil // by a restored backup
	c.run(10)
	g.Expect(h.GPU.Spec.Baseline).To(Equal(baseline))
	g.Expect(h.GPU.Spec.Memory).To(BeNil())
}
