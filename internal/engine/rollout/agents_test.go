// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestTheAgentIsAllowed: the label that the agent's DaemonSet selects is set where no GPU Operator does, with a record,
// and no value of another author is ever changed.
func TestTheAgentIsAllowed(t *testing.T) {
	for name, c := range map[string]struct {
		labels  map[string]string
		sets    bool
		message string
	}{
		"absent":                    {sets: true},
		"empty":                     {labels: map[string]string{v1alpha1.LabelRunsAgent: ""}, sets: true},
		"false":                     {labels: map[string]string{v1alpha1.LabelRunsAgent: "false"}, message: `is "false"; set it to true`},
		"stopped by driver-manager": {labels: map[string]string{v1alpha1.LabelRunsAgent: driverStopped}, message: "Waiting for a driver upgrade"},
		"left stopped by driver-manager": {
			labels:  map[string]string{v1alpha1.LabelRunsAgent: driverStopped, upgradeLabel: "validation-required"},
			message: "If nvidia.com/gpu.deploy.client stays stopped, delete the driver's pod on the node",
		},
		"stopped by mig-manager":            {labels: map[string]string{v1alpha1.LabelRunsAgent: managerStopped}, message: "mig-manager is changing"},
		"set already":                       {labels: map[string]string{v1alpha1.LabelRunsAgent: "true"}, message: "the agent on the node is not Ready"},
		"the node has opted out":            {labels: map[string]string{optOutLabel: "false"}, message: optOutLabel + "=false"},
		"the node has lost its GPUs":        {labels: map[string]string{"nvidia.com/gpu.present": "false"}, message: "finds no GPU"},
		"without a policy, nothing is said": {sets: true},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w, h := toMIG()
			delete(h.Labels, v1alpha1.LabelRunsAgent)
			h.AgentReady = false
			maps.Copy(h.Labels, c.labels)
			if c.message == "" && !c.sets {
				t.Fatal("the case expects nothing")
			}
			was := h.Labels[v1alpha1.LabelRunsAgent]
			d := w.reconcile()
			if c.sets {
				g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelRunsAgent, "true"))
				g.Expect(h.Annotations).To(HaveKey(v1alpha1.AnnotationRunsAgent))
				return
			}
			g.Expect(h.Labels[v1alpha1.LabelRunsAgent]).To(Equal(was))
			g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationRunsAgent))
			hasMessage(g, d, c.message)
		})
	}
}

// TestANodeThatOptedOutIsNotToldToRunTheAgent: for nvidia.com/gpu.deploy.operands=false the GPU Operator removes every
// deploy label, that of the agent too and also when an administrator sets it again, so the agent leaves within seconds.
func TestANodeThatOptedOutIsNotToldToRunTheAgent(t *testing.T) {
	g := NewWithT(t)
	w, h := toMIG()
	w.run(90)
	optOut := func() {
		delete(h.Labels, v1alpha1.LabelRunsAgent)
		h.Labels[optOutLabel], h.AgentReady = "false", false
	}
	optOut()
	d := w.reconcile()
	g.Expect(one(d).State).To(Equal(node.Unsupported), "as before the agent has left")
	hasReason(g, d, v1alpha1.ReasonNodeOptedOut)
	hasMessage(g, d, "remove the label, or leave the node out of nodeSelector")

	w.Policies = nil
	d, _ = w.run(10)
	hasReason(g, d, v1alpha1.ReasonNodeOptedOut)
	hasMessage(g, d, "its GPUs cannot be restored; take that back until they are")
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelRunsAgent))

	delete(h.Labels, optOutLabel)
	h.Labels[v1alpha1.LabelRunsAgent], h.AgentReady = "true", true
	d, _ = w.run(90)
	g.Expect(d.Nodes).To(BeEmpty())
	isForgotten(g, h)
}

// TestANodeWhoseGPUsWereTakenOutTellsHowItIsForgotten: no agent will ever restore it, and it would keep the operator from being removed.
func TestANodeWhoseGPUsWereTakenOutTellsHowItIsForgotten(t *testing.T) {
	g := NewWithT(t)
	w, h := toMIG()
	w.run(100)
	g.Expect(w.ready()).To(Equal(1))
	h.hardware.Update(func(n *sim.Node) { n.GPUs = nil })
	h.Labels["nvidia.com/gpu.present"], h.AgentReady = "false", false
	delete(h.Labels, v1alpha1.LabelRunsAgent)
	w.Policies = nil
	d, _ := w.run(100)
	g.Expect(one(d).Message).To(And(ContainSubstring("finds no GPU"), ContainSubstring("run kubectl delete node/a gpunode/a and"), Not(ContainSubstring("nodeSelector"))))
}

func TestTheAgentIsAllowedWithoutAPolicy(t *testing.T) {
	g := NewWithT(t)
	w := newSite()
	h := w.add("a", sim.A100)
	delete(h.Labels, v1alpha1.LabelRunsAgent)
	w.reconcile()
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelRunsAgent, "true"))
	delete(h.Labels, v1alpha1.LabelRunsAgent)
	w.steps(3)
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelRunsAgent), "it is not fought over")
	w.Now = w.Now.Add(time.Hour)
	w.reconcile()
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelRunsAgent, "true"))
}

// TestMIGManagerMayTakeTheAgentAway: NVIDIA's mig-manager v0.15 switches off the label of clients, too, while it does what it
// is asked for.
func TestMIGManagerMayTakeTheAgentAway(t *testing.T) {
	g := NewWithT(t)
	w := newSite()
	h := withManager(w, sim.A100)
	w.setPolicy("research", byManager(count("2g", 3)))
	reasons, away := map[string]bool{}, false
	for range 90 {
		stopped := h.Labels[v1alpha1.LabelRunsAgent] == managerStopped
		for _, n := range w.reconcile().Nodes {
			reasons[n.Reason] = reasons[n.Reason] || stopped
		}
		w.tick(time.Second)
		away = away || !h.AgentReady
	}
	g.Expect(away).To(BeTrue())
	w.settles(g, 10)
	g.Expect(reasons[v1alpha1.ReasonAgentNotReporting]).To(BeFalse())
	g.Expect(h.applied).NotTo(BeEmpty())
}
