// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestATaintRuleThatCannotBeWrittenHasAReasonAndBlocksNoOtherNode: another node of the policy takes the turn, and the
// node goes on once it can.
func TestATaintRuleThatCannotBeWrittenHasAReasonAndBlocksNoOtherNode(t *testing.T) {
	for name, c := range map[string]struct {
		set    func(h *host, prevented bool)
		reason string
		says   string
	}{
		"another's has its name": {
			set:    func(h *host, prevented bool) { h.TaintRuleTaken = prevented },
			reason: v1alpha1.ReasonDRAUnavailable, says: "DeviceTaintRule gpusharing-a exists and is not the operator's",
		},
		"a webhook refuses it": {
			set:    func(h *host, prevented bool) { h.driver.refused = prevented },
			reason: v1alpha1.ReasonWriteFailed, says: "DeviceTaintRule gpusharing-a",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cluster, a := onDRA(mig(count("1g", 7)), evicting)
			cluster.Repeats = &action.Repeats{}
			b := cluster.addDRA("b", sim.A100)
			c.set(a, true)
			d := cluster.noting(5 * time.Minute)
			g.Expect(d.Nodes[0].Reason).To(Equal(c.reason), d.Nodes[0].Message)
			g.Expect(d.Nodes[0].Message).To(ContainSubstring(c.says))
			g.Expect(d.Nodes[1].State).To(Equal(node.UpToDate), d.Nodes[1].Message)
			g.Expect(b.Published.Published()).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7}))
			g.Expect(a.devices()[0].State.MIG).To(BeFalse())
			g.Expect(cluster.writes["action.TaintDevices"]).To(BeNumerically("<=", 9))
			c.set(a, false)
			cluster.Now = cluster.Now.Add(time.Hour)
			d = cluster.noting(5 * time.Minute)
			g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), d.Nodes[0].Message)
		})
	}
}

// noting reconciles every second, and counts what is written as the executor does.
func (c *site) noting(d time.Duration) (last rollout.Decision) {
	for range int(d / time.Second) {
		last = c.memory.decide(c.world())
		for _, a := range last.Actions {
			c.do(a)
			if _, rules := a.(action.TaintDevices); rules && c.hosts[a.NodeName()].driver.refused {
				c.Repeats.Refuse(a, "denied by webhook", c.Now)
				continue
			}
			c.Repeats.Note(a, c.Now)
		}
		c.tick(time.Second)
	}
	return last
}

// TestANodeIsReleasedOnceTaintRulesAreServedAgain: until then its GPUNode has the reason.
func TestANodeIsReleasedOnceTaintRulesAreServedAgain(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)), evicting)
	c.run(120)
	c.DRA.ServesTaintRules, c.Policies = false, nil
	c.during(5*time.Minute, time.Second)
	g.Expect(h.devices()[0].State.MIG).To(BeTrue())
	g.Expect(h.waits()).To(And(HavePrefix("DRAUnavailable: "), ContainSubstring("serves no DeviceTaintRules")), "%v", c.writes)
	c.DRA.ServesTaintRules = true
	c.run(240)
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(h.Annotations).To(BeEmpty())
}
