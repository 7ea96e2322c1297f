// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestNoPolicyIsNotEverythingRestored: a node can wait for its pods long after its policy was deleted.
func TestNoPolicyIsNotEverythingRestored(t *testing.T) {
	g := NewWithT(t)
	restored, waiting := ready(newNode(t, "a", sim.T4)), newNode(t, "b", sim.T4)
	g.Expect(sight{snapshot: snapshotOf(restored)}.page().NoPolicy).To(Equal("There is no GPUSharingPolicy: all GPUs are in their former state."))
	waiting.GPU.Spec.PolicyName = "gone"
	g.Expect(sight{snapshot: snapshotOf(restored, waiting)}.page().NoPolicy).To(Equal("There is no GPUSharingPolicy any more; not restored yet: 1 node."))
}

func TestEqualStepsAreOneLine(t *testing.T) {
	g := NewWithT(t)
	g.Expect(brief([]string{
		"GPU 0 (NVIDIA-A30): destroy 2g.12gb at 0:2", "GPU 0 (NVIDIA-A30): create 1g.6gb at 0:1", "GPU 0 (NVIDIA-A30): create 1g.6gb at 1:1",
		"GPU 1 (NVIDIA-A30): create 1g.6gb at 0:1", "device plugin: select configuration x", "device plugin: select configuration x",
	})).To(Equal([]string{
		"GPU 0 (NVIDIA-A30): destroy 2g.12gb at 0:2", "GPU 0 (NVIDIA-A30): create 2 × 1g.6gb", "GPU 1 (NVIDIA-A30): create 1g.6gb at 0:1",
		"device plugin: select configuration x",
	}))
}

// TestOnePodThatNoPolicyServesIsOneLine: its request is in the condition of each policy whose nodes it may go to, with other advice in each.
func TestOnePodThatNoPolicyServesIsOneLine(t *testing.T) {
	g := NewWithT(t)
	told := func(name, message string) v1alpha1.GPUSharingPolicy {
		c := metav1.Condition{Type: v1alpha1.ConditionWorkloadsAffected, Status: metav1.ConditionTrue, Message: message}
		return v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.GPUSharingPolicyStatus{Conditions: []metav1.Condition{c}}}
	}
	const asks = "Pod a/b asks for nvidia.com/mig-4g.20gb: 1, which no node will offer; "
	lines := func(policies ...v1alpha1.GPUSharingPolicy) (lines []string) {
		var shown text
		shown.policies(policies, nil, time.Time{})
		for line := range strings.Lines(shown.String()) {
			if strings.Contains(line, "WorkloadsAffected") {
				lines = append(lines, strings.TrimSpace(line))
			}
		}
		return lines
	}
	fast, slow := told("fast", "Pod a/b asks for nvidia.com/mig-4g.20gb: 1, which no … nodes offer nvidia.com/gpu.shared: ask for one, or change the policy"), told("slow", asks+"ask for nvidia.com/gpu")
	g.Expect(lines(fast, slow)).To(ConsistOf("2 policies (fast, slow): WorkloadsAffected: Pod a/b asks for nvidia.com/mig-4g.20gb; kubectl gpusharing why says what to ask for"))
	g.Expect(lines(slow)).To(ConsistOf("slow: WorkloadsAffected: " + asks + "ask for nvidia.com/gpu"))
	equal := told("more", asks+"ask for nvidia.com/gpu")
	equal.Status.Conditions[0].Message = "another note of WorkloadsAffected"
	twin := equal
	twin.Name = "twin"
	g.Expect(lines(equal, twin)).To(ConsistOf("2 policies (more, twin): WorkloadsAffected: another note of WorkloadsAffected"))
	const more = "Pod c/d asks for nvidia.com/gpu: 9, which no node will offer; its nodes offer at most 2 of nvidia.com/gpu each: ask for no more; and 1 more"
	other := told("other", more)
	g.Expect(lines(fast, other, slow)).To(ConsistOf(HavePrefix("2 policies (fast, slow): "), Equal("other: WorkloadsAffected: "+more)), "what says more stays")
	g.Expect(lines(other, told("third", "Pod c/d asks for nvidia.com/gpu: … ask for one; and 1 more"))).To(
		ConsistOf("2 policies (other, third): WorkloadsAffected: Pod c/d asks for nvidia.com/gpu, and 1 more; kubectl gpusharing why says what to ask for"))
}

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
		g.Expect(shown.String()).To(HavePrefix("NODE a02   policy research   NotListed\n  why          Policy research counts 1 node "))
	})
}

// TestWhatIsPrintedOfANodeThatChanges: an instance has its profile and place, not NVML's number, and a word stands once.
func TestWhatIsPrintedOfANodeThatChanges(t *testing.T) {
	g := NewWithT(t)
	n := newNode(t, "a", sim.A100)
	n.GPU.Status.Devices[0].Instances = []v1alpha1.InstanceStatus{{ID: 2, Profile: "3g.20gb", Start: 4, Size: 4}}
	n.GPU.Status.Rollout.Blockers = []v1alpha1.BlockerStatus{{
		Kind: v1alpha1.BlockerKindPod, Namespace: "team", Name: "train", DeviceUUID: n.GPU.Status.Devices[0].UUID, Instance: new(int32(2)), Handling: "is waited for",
	}}
	r := &report{Name: "a", Reason: "Applying", State: "Applying", Message: "the agent is changing the GPUs", BlockedBy: blockers(&n.GPU), node: &n, Stack: dra.DevicePlugin}
	shown := text{width: 120}
	shown.statusOf(r)
	g.Expect(shown.String()).To(HavePrefix("NODE a   no policy   Applying\n  why          The agent is changing the GPUs\n  advertises   nothing\n" +
		"  blocked by   pod team/train uses GPU 0, instance 3g.20gb at 4:4: is waited for\n"))
	g.Expect(instead([]offer{{Resource: "a"}, {Resource: "b"}})).To(HavePrefix("Ask for one of a"))
	g.Expect(leftOfNode(&v1alpha1.GPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: v1alpha1.GPUNodeSpec{PolicyName: "research"}, Status: v1alpha1.GPUNodeStatus{Conditions: []metav1.Condition{{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonGPUInUse, Message: "Waiting for pod team/train",
		}}},
	})).To(Equal("node/a is shared by policy research: GPUInUse: Waiting for pod team/train"), "what restore waits for")
	lacking := &gathering{unread: []unread{{What: "log of a", Reason: "no address"}, {What: "b", Reason: "forbidden"}, {What: "log of c", Reason: "no address"}}}
	g.Expect(lacking.written("x", 1, 120)).To(HaveSuffix("Not in it: log of a, log of c: no address\nNot in it: b: forbidden\n"))
}
