// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// sharedByMPS is a cluster with a node that is shared by MPS, and with two pods on it.
func sharedByMPS(g *WithT) (*site, *host) {
	c := newSite()
	h := c.add("a", sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mps(4))}
	d, _ := c.run(100)
	g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), d.Nodes[0].Message)
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "team-a", Name: "train", UID: "1"}, cluster.Pod{Namespace: "team-b", Name: "infer", UID: "2"})
	return c, h
}

func TestPodsWithFormerLimitsAreNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := sharedByMPS(g)
	h.GPU.Status.MPS = []v1alpha1.MPSStatus{{
		ResourceName: "nvidia.com/gpu", Clients: 3, OutdatedClients: 2, OutdatedPodUIDs: []string{"2", "1"},
	}}
	n := rollout.Decide(c.world()).Nodes[0]
	g.Expect(n.State).To(Equal(node.UpToDate))
	g.Expect(n.Reason).To(Equal(v1alpha1.ReasonLimitsPending))
	g.Expect(n.Message).To(HavePrefix("team-a/train, team-b/infer: started before the MPS limits changed"))

	h.GPU.Status.MPS[0].OutdatedClients, h.GPU.Status.MPS[0].OutdatedPodUIDs = 0, nil
	g.Expect(rollout.Decide(c.world()).Nodes[0].Reason).To(Equal(v1alpha1.ReasonReady))
}

func TestPodsThatWaitForAnotherUserAreNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := sharedByMPS(g)
	h.GPU.Status.MPS = []v1alpha1.MPSStatus{{
		ResourceName: "nvidia.com/gpu", User: new(int64(1000650000)), Clients: 1,
		WaitingPods: []v1alpha1.MPSWaitingPod{{UID: "2", User: 1000660000}, {UID: "gone", User: 0}},
	}}
	n := rollout.Decide(c.world()).Nodes[0]
	g.Expect(n.Reason).To(Equal(v1alpha1.ReasonMPSUserWaiting))
	g.Expect(n.Message).To(HavePrefix("MPS serves one user ID at a time, now 1000650000; " +
		"waiting: pod gone (user 0), team-b/infer (user 1000660000); run all pods"))
}

func TestADaemonThatNewPodsCannotReachIsNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := sharedByMPS(g)
	h.GPU.Status.MPS = []v1alpha1.MPSStatus{{ResourceName: "nvidia.com/gpu", Clients: 3, Unreachable: true}}
	n := rollout.Decide(c.world()).Nodes[0]
	g.Expect(n.State).To(Equal(node.UpToDate))
	g.Expect(n.Reason).To(Equal(v1alpha1.ReasonMPSUnreachable))
	g.Expect(n.Message).To(HavePrefix("nvidia.com/gpu: another program replaced the shared memory of MPS"))
	g.Expect(n.Message).To(HaveSuffix("until no client is connected, now 3; restart the pods that use MPS"))

	h.GPU.Status.MPS[0].Unreachable = false
	g.Expect(rollout.Decide(c.world()).Nodes[0].Reason).To(Equal(v1alpha1.ReasonReady))
}
