// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func unavailable(n string) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.MaxUnavailable = new(intstr.Parse(n)) }
}

func taint() corev1.Taint {
	return corev1.Taint{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &metav1.Time{Time: time.Unix(1_800_000_000, 0)}}
}

// started are the nodes that a decision starts to change.
func started(d rollout.Decision) []string {
	var nodes []string
	for _, a := range d.Actions {
		switch a.(type) {
		case action.Taint, action.SetSpec:
			nodes = append(nodes, a.NodeName())
		}
	}
	return nodes
}

func TestPace(t *testing.T) {
	for name, c := range map[string]struct {
		unavailable string
		reached     int // nodes that have the configuration already
		changing    int // nodes that are changing
		starts      []string
		reason      string // of the last node
	}{
		"the first node goes alone, whatever the budget": {
			unavailable: "100%", starts: []string{"n0"}, reason: v1alpha1.ReasonWaitingForFirst,
		},
		"once it has verified the others follow": {
			unavailable: "100%", reached: 1, starts: []string{"n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"},
			reason: v1alpha1.ReasonProgressing,
		},
		"one after the other": {
			unavailable: "1", reached: 1, starts: []string{"n1"}, reason: v1alpha1.ReasonWaitingForBudget,
		},
		"a number of nodes": {
			unavailable: "3", reached: 1, starts: []string{"n1", "n2", "n3"}, reason: v1alpha1.ReasonWaitingForBudget,
		},
		"a percentage is rounded up": {
			unavailable: "25%", reached: 1, starts: []string{"n1", "n2", "n3"}, reason: v1alpha1.ReasonWaitingForBudget,
		},
		"those that are changing take their places": {
			unavailable: "3", reached: 1, changing: 2, starts: []string{"n3"}, reason: v1alpha1.ReasonWaitingForBudget,
		},
		"no slot remains": {
			unavailable: "2", reached: 1, changing: 2, reason: v1alpha1.ReasonWaitingForBudget,
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := newSite()
			for i := range 10 {
				cl.add(fmt.Sprintf("n%d", i), sim.A100)
			}
			cl.setPolicy("research", mig(count("1g", 7)), unavailable(c.unavailable))
			for cl.ready() < c.reached {
				cl.steps(1)
			}
			for i := range c.changing {
				h := cl.hosts[fmt.Sprintf("n%d", c.reached+i)]
				h.Taints = []corev1.Taint{taint()}
				h.GPU.Status.Devices = nil // an agent that does not get on
			}
			for i := c.reached + c.changing; i < 10; i++ {
				cl.hosts[fmt.Sprintf("n%d", i)].Taints = nil
			}
			d := rollout.Decide(cl.world())
			g.Expect(started(d)).To(Equal(c.starts))
			g.Expect(d.Nodes[9].Reason).To(Equal(c.reason), d.Nodes[9].Message)
			g.Expect(d.Actions).To(Equal(rollout.Decide(cl.world()).Actions), "the same world gives the same decision")
		})
	}
}

// TestANodeWithOperandsLeftStoppedHoldsItsSlot: its taint is gone, and the write that starts NVIDIA's operands again has failed.
func TestANodeWithOperandsLeftStoppedHoldsItsSlot(t *testing.T) {
	for name, release := range map[string]func(*site){
		"where the policy cannot be honoured any more": func(c *site) { c.hosts["a"].Labels[optOutLabel] = "false" },
		"where the agent is lost":                      func(c *site) { c.hosts["a"].AgentReady = false },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			for _, node := range []string{"a", "b"} {
				c.add(node, sim.A100)
			}
			c.setPolicy("research", mig(count("2g", 3)))
			c.steps(1)
			c.reconcile() // the operands are stopped, and are still there
			g.Expect(c.hosts["a"].Annotations).To(HaveKey(v1alpha1.AnnotationStopped))
			release(c)
			c.hosts["a"].Taints = nil
			d := rollout.Decide(c.world())
			g.Expect(started(d)).NotTo(ContainElement("b"), "%v", d.Nodes)
			c.tick(20 * time.Minute)
			c.run(60)
			g.Expect(c.hosts["a"].Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
			g.Expect(c.hosts["b"].GPU.Spec.ConfigName).NotTo(BeEmpty(), "then it is the turn of the other")
		})
	}
}

// TestADesiredStateThatFailedBeforeTakesNoSlotOnTop: the record that it did stays while others are asked for, and
// another node may have begun with one of those.
func TestADesiredStateThatFailedBeforeTakesNoSlotOnTop(t *testing.T) {
	g := NewWithT(t)
	c, a := toMIG()
	c.hold(a, "train", 1, gpu.WholeGPU)
	c.steps(5)
	c.tick(10 * time.Minute)
	c.steps(3)
	g.Expect(a.GPU.Status.Rollout.Failed.Reason).To(Equal(v1alpha1.ReasonDrainTimedOut))
	c.end(a, "train")
	b := c.add("b", sim.A100)
	b.Taints = []corev1.Taint{taint()}
	d := rollout.Decide(c.world())
	g.Expect(started(d)).NotTo(ContainElement("a"), "%v", d.Nodes)
	hasReason(g, d, v1alpha1.ReasonWaitingForBudget)
	d, _ = c.run(120)
	g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(2)), "%v", d.Nodes)
}

// ready counts the nodes that have reached their configuration.
func (c *site) ready() int {
	n := 0
	for _, h := range c.hosts {
		if h.GPU.Status.Rollout.LastGood != nil {
			n++
		}
	}
	return n
}

func TestAllNodesShareOneWriteOfKeys(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	for i := range 6 {
		c.add(fmt.Sprintf("n%d", i), []sim.Model{sim.A100, sim.H100}[i%2])
	}
	c.setPolicy("research", mig(count("1g", 7)), unavailable("100%"))
	d, _ := c.run(100)
	g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(6)))
	g.Expect(c.writes["action.WriteConfigs"]).To(Equal(1))
	g.Expect(c.Configs).To(HaveLen(2), "a key for each kind of node")

	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(4), 2
	c.run(100)
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 3
	c.run(100)
	g.Expect(c.writes["action.WriteConfigs"]).To(Equal(3))
	g.Expect(c.Configs).To(HaveLen(2), "this one and the one before, which was still selected: older ones are gone")
}

func TestANonDisruptiveChangeCostsOnePatchOfTheNodeAndDisturbsNobody(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.run(60)
	c.hold(h, "train", 0, -1)
	clear(c.writes)
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
	c.settles(g, 60)
	isOffered(g, h, gpusOnly(16))
	g.Expect(c.writes).To(Equal(map[string]int{
		"action.WriteConfigs": 1, "action.TriggerSync": 2, "action.PatchNode": 1, "action.SetSpec": 1, "action.Report": 1,
	}))
}
