// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAChangeIsOneGeneration: that a desired state was verified is no new generation, so the agent is not woken for it.
func TestAChangeIsOneGeneration(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	found := h.GPU.Generation
	c.settles(g, 60)
	g.Expect(h.GPU.Generation).To(Equal(found + 1))
	first := h.GPU.Spec.ConfigName
	g.Expect(h.GPU.Status.Rollout.LastGood.ConfigName).To(Equal(first))

	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
	c.steps(1)
	g.Expect(h.GPU.Generation).To(Equal(found + 2))
	g.Expect(h.GPU.Status.Rollout.LastGood.ConfigName).To(Equal(first))
	c.settles(g, 60)
	g.Expect(h.GPU.Generation).To(Equal(found + 2))
	g.Expect(h.GPU.Status.Rollout.LastGood.ConfigName).To(Equal(h.GPU.Spec.ConfigName))

	c.Policies = nil
	c.run(60)
	isForgotten(g, h)
	g.Expect(h.GPU.Status.Rollout).To(Equal(v1alpha1.RolloutStatus{}))
	g.Expect(h.kstatus(t)).To(Equal(status.CurrentStatus))
}

// TestANodeThatBreaksOnceItWasVerified is degraded, is waited for however long it takes, and is what a later change
// that fails goes back to, though it did not work when that came.
func TestANodeThatBreaksOnceItWasVerified(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.run(60)
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
	c.run(60)
	good := h.GPU.Spec.ConfigName
	h.broken = func(cluster.Snapshot) bool { return true }
	h.plugin.running = false
	for range 12 {
		c.tick(10 * time.Minute)
		d := c.reconcile()
		if one(d).State == node.Selecting { // the plugin is started anew
			continue
		}
		hasState(g, d, node.Degraded)
		hasReason(g, d, v1alpha1.ReasonNotAdvertised)
		g.Expect(h.GPU.Status.Rollout.Failed).To(BeNil())
	}
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1))
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(2), 3
	d, _ := c.run(400)
	isFailed(g, d)
	g.Expect(h.Labels[v1alpha1.LabelConfig]).To(Equal(good))
}

// TestADesiredStateThatAUserEditsIsVerifiedAnew: what was verified is what lastGood holds, and nothing else.
func TestADesiredStateThatAUserEditsIsVerifiedAnew(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.run(60)
	h.GPU.Spec.ConfigName = "mine"
	h.GPU.Generation++
	c.settles(g, 60)
	g.Expect(h.GPU.Status.Rollout.LastGood.ConfigName).To(Equal(h.GPU.Spec.ConfigName))
}

// kstatus is what Flux, Argo CD and kpt conclude from the GPUNode of a host.
func (h *host) kstatus(t *testing.T) status.Status {
	t.Helper()
	g, n := NewWithT(t), h.GPU.DeepCopy()
	n.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "GPUNode"}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(n)
	g.Expect(err).NotTo(HaveOccurred())
	result, err := status.Compute(&unstructured.Unstructured{Object: content})
	g.Expect(err).NotTo(HaveOccurred())
	return result.Status
}

func (h *host) ready() metav1.Condition {
	c, _ := condition.Find(h.GPU.Status.Conditions, v1alpha1.ConditionReady)
	return c
}

// losesStatus takes the whole status of a GPUNode away, as a restore from a backup does, until its agent reports.
func (h *host) losesStatus() { h.GPU.Status = v1alpha1.GPUNodeStatus{} }

// TestANodeWhoseStatusIsLostIsVerifiedAnew: it is not ready before its agent has reported, and its spec stays.
func TestANodeWhoseStatusIsLostIsVerifiedAnew(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.run(60)
	good, generation := h.GPU.Status.Rollout.LastGood, h.GPU.Generation
	g.Expect(good).NotTo(BeNil())
	h.losesStatus()
	c.reconcile()
	g.Expect(h.ready().Status).NotTo(Equal(metav1.ConditionTrue), "its agent has not reported")
	g.Expect(h.GPU.Status.Rollout.LastGood).To(BeNil())
	g.Expect(h.kstatus(t)).NotTo(Equal(status.CurrentStatus))
	h.report()
	c.run(60)
	g.Expect(h.GPU.Status.Rollout.LastGood).To(Equal(good))
	g.Expect(h.ready().Status).To(Equal(metav1.ConditionTrue))
	g.Expect(h.GPU.Generation).To(Equal(generation))
}

// TestANodeWhoseStatusIsLostKeepsItsSlot: no other node begins while it is being changed.
func TestANodeWhoseStatusIsLostKeepsItsSlot(t *testing.T) {
	partitioned := func(*v1alpha1.GPUSharingPolicy) {}
	sliced := func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = timeSlicing(4) }
	for name, test := range map[string]struct {
		requests func(*v1alpha1.GPUSharingPolicy)
		reports  bool
	}{
		"tainted, and its agent reports":           {partitioned, true},
		"tainted, and its agent reports no more":   {partitioned, false},
		"untainted, and its agent reports":         {sliced, true},
		"untainted, and its agent reports no more": {sliced, false},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(test.requests)
			other := c.add("b", sim.A100)
			for h.GPU.Spec.ConfigName == "" {
				c.steps(1)
			}
			h.broken = func(cluster.Snapshot) bool { return true }
			h.losesStatus()
			h.lags = !test.reports
			for range 100 {
				d := c.reconcile()
				g.Expect(d.Policies["research"].Nodes.Changing).To(BeEquivalentTo(1))
				g.Expect(other.Taints).To(BeEmpty())
				g.Expect(other.GPU.Spec.ConfigName).To(BeEmpty())
				g.Expect(h.ready().Status).NotTo(Equal(metav1.ConditionTrue))
				c.tick(time.Second)
			}
		})
	}
}

// TestANodeThatWaitsIsReportedOnce, however many reconciles there are, and with the pods that block it.
func TestANodeThatWaitsIsReportedOnce(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(neverEvicting)
	c.hold(h, "train", 1, gpu.WholeGPU)
	c.steps(30)
	g.Expect(c.writes["action.Report"]).To(Equal(1))
	g.Expect(h.ready()).To(And(HaveField("Status", metav1.ConditionFalse), HaveField("Reason", v1alpha1.ReasonGPUInUse)))
	g.Expect(h.GPU.Status.Rollout.Blockers).To(ConsistOf(v1alpha1.BlockerStatus{
		Kind: v1alpha1.BlockerKindPod, Namespace: "user", Name: "train", ContainerName: "main", DeviceUUID: h.devices()[1].UUID,
		Handling: "is waited for, however long, while the node takes new pods (rollout.drain.mode Never)",
	}))
	g.Expect(h.GPU.Status.Rollout.Steps).NotTo(BeEmpty())
	g.Expect(h.kstatus(t)).To(Equal(status.InProgressStatus))
}

// TestAStageThatTakesLongIsReported, so that the last report is no older than half a minute.
func TestAStageThatTakesLongIsReported(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.run(60)
	h.broken = func(cluster.Snapshot) bool { return true }
	c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = timeSlicing(8) })
	c.steps(20)
	g.Expect(h.ready().Status).To(Equal(metav1.ConditionTrue), "of the generation before")
	g.Expect(h.kstatus(t)).To(Equal(status.InProgressStatus))
	c.steps(40)
	g.Expect(h.ready()).To(And(HaveField("Status", metav1.ConditionFalse), HaveField("Reason", v1alpha1.ReasonVerifying)))
}

// TestOthersAreNotReportedWhileOneGoesFirst: that all other nodes wait for the first one is told of each of them once it takes longer than
// a report is worth. Until then the policy's counts tell it.
func TestOthersAreNotReportedWhileOneGoesFirst(t *testing.T) {
	for name, firstWorks := range map[string]bool{"the first is soon done": true, "the first takes long": false} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			for _, node := range []string{"a", "b", "c"} {
				c.add(node, sim.T4)
			}
			c.setPolicy("research", timeSlicing(4), unavailable("100%"))
			c.run(60)
			g.Expect(c.ready()).To(Equal(3))
			c.hosts["a"].broken = func(cluster.Snapshot) bool { return !firstWorks }
			c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
			reports := c.writes["action.Report"]

			began := c.Now
			for c.hosts["b"].ready().Reason != v1alpha1.ReasonWaitingForFirst && c.Now.Sub(began) < 2*time.Minute {
				c.reconcile()
				c.tick(time.Second)
			}
			if firstWorks {
				g.Expect(c.ready()).To(Equal(3))
				g.Expect(c.writes["action.Report"]).To(Equal(reports+3), "one report of each node: that it is done")
				return
			}
			g.Expect(c.Now.Sub(began)).To(And(BeNumerically(">", 25*time.Second), BeNumerically("<", time.Minute)))
			g.Expect(c.hosts["c"].ready().Reason).To(Equal(v1alpha1.ReasonWaitingForFirst))
		})
	}
}
