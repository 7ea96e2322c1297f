// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
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
	const asks = "Pod a/b asks for nvidia.com/mig-4g.20gb: 1, which no node offers then; "
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
	const more = "Pod c/d asks for nvidia.com/gpu: 9, which no node offers then; its nodes offer at most 2 of nvidia.com/gpu each: ask for no more; and 1 more"
	other := told("other", more)
	g.Expect(lines(fast, other, slow)).To(ConsistOf(HavePrefix("2 policies (fast, slow): "), Equal("other: WorkloadsAffected: "+more)), "what says more stays")
	g.Expect(lines(other, told("third", "Pod c/d asks for nvidia.com/gpu: … ask for one; and 1 more"))).To(
		ConsistOf("2 policies (other, third): WorkloadsAffected: Pod c/d asks for nvidia.com/gpu, and 1 more; kubectl gpusharing why says what to ask for"))
}
