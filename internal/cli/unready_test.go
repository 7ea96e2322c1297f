// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"regexp"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// forty are 40 nodes, the last of which cannot have MIG, under a policy that partitions them, and the status of that.
func forty(t *testing.T) cluster.Snapshot {
	t.Helper()
	nodes := []cluster.Node{newNode(t, "t4", sim.T4)}
	for i := range 39 {
		nodes = append(nodes, newNode(t, fmt.Sprintf("a%02d", i), sim.A100))
	}
	s := snapshotOf(nodes...)
	s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", fmt.Sprintf(toMIG, "WaitForIdle"))}
	s.Policies[0].Status = rollout.Decide(s).Policies["research"]
	return s
}

// printed are the nodes that status prints, each with what stands on its line.
func printed(s cluster.Snapshot) map[string]string {
	shown := &text{}
	shown.status(s, query{all: true})
	states := map[string]string{}
	for _, line := range regexp.MustCompile(`(?m)^NODE (\S+)   (.*)$`).FindAllStringSubmatch(shown.String(), -1) {
		states[line[1]] = line[2]
	}
	return states
}

// TestOfFortyNodesNoneIsPrintedAsReadyThatIsNot: the agents of all nodes report Ready, because nothing was asked of
// them yet.
func TestOfFortyNodesNoneIsPrintedAsReadyThatIsNot(t *testing.T) {
	t.Run("the worst nodes are listed", func(t *testing.T) {
		g := NewWithT(t)
		s := forty(t)
		listed := s.Policies[0].Status.Pending
		g.Expect(listed).To(HaveLen(10))
		g.Expect(listed[0].NodeName).To(Equal("t4"))
		states := printed(s)
		g.Expect(states).To(HaveLen(40))
		g.Expect(states).To(HaveKeyWithValue("t4", "policy research   MIGNotSupported (Unsupported)"))
		g.Expect(states).To(HaveKeyWithValue("a38", "policy research   WaitingForBudget (PendingDisruptive)"))
		g.Expect(states).NotTo(ContainElement(HaveSuffix("Ready")))
	})
	t.Run("ten nodes are worse than the one that is not listed", func(t *testing.T) {
		g := NewWithT(t)
		s := forty(t)
		s.Policies[0].Status.Pending = nil
		for i := range v1alpha1.MostPending {
			s.Policies[0].Status.Pending = append(s.Policies[0].Status.Pending, v1alpha1.PendingNode{
				NodeName: fmt.Sprintf("a%02d", i), State: string(node.Failed), Reason: v1alpha1.ReasonApplyTimedOut, Message: "failed",
			})
		}
		states := printed(s)
		g.Expect(states).To(HaveKeyWithValue("a09", "policy research   ApplyTimedOut (Failed)"))
		g.Expect(states).To(HaveKeyWithValue("t4", "policy research   MIGNotSupported (Unsupported)"))
		g.Expect(states).NotTo(ContainElement(HaveSuffix("Ready")))
	})
	t.Run("the objects of the nodes show fewer than the policy counts", func(t *testing.T) {
		g := NewWithT(t)
		found := map[string]pendingNode{"a00": {}}
		addUnlisted(found, "research", 2, []rollout.NodeState{
			{Node: "a00", Policy: "research", State: node.Failed},
			{Node: "a01", Policy: "research", State: node.Draining},
			{Node: "a02", Policy: "research", State: node.UpToDate},
			{Node: "b", Policy: "other", State: node.UpToDate},
		})
		g.Expect(found).To(HaveLen(3))
		g.Expect(found["a01"].State).To(Equal(string(node.Draining)))
		g.Expect(found["a02"].Reason).To(Equal(notListed))
		shown, n := &text{}, newNode(t, "a02", sim.A100)
		r := reportOf(&n, dra.DevicePlugin, found["a02"])
		shown.statusOf(&r)
		g.Expect(shown.String()).To(HavePrefix("NODE a02   policy research   NotListed\n  why          policy research counts 1 node "))
	})
}
