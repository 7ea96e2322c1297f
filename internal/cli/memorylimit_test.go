// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// limitedNode is a node whose agent reports a condition about its limits; without a reason none.
func limitedNode(memory *v1alpha1.TimeSlicedMemory, status metav1.ConditionStatus, reason, message string) *v1alpha1.GPUNode {
	n := &v1alpha1.GPUNode{Spec: v1alpha1.GPUNodeSpec{Memory: memory}}
	if reason != "" {
		n.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionMemoryLimited, Status: status, Reason: reason, Message: message}}
	}
	return n
}

func TestOneLineSaysWhetherMemoryIsLimited(t *testing.T) {
	guarded := v1alpha1.MemoryGuard{Mode: v1alpha1.MemoryGuardReport, FreeBelowPercent: 5}
	enforced := &v1alpha1.TimeSlicedMemory{Limit: v1alpha1.MemoryLimitEnforce}
	for want, n := range map[string]*v1alpha1.GPUNode{
		"": limitedNode(nil, "", "", ""),
		"hard: 3 pods are limited, as read back (dmem)": limitedNode(enforced, metav1.ConditionTrue, v1alpha1.ReasonEnforced, "3 pods are limited, as read back (dmem)"),
		"none. Not hard: DriverTooOld: driver 580.95.05 is older than 615": limitedNode(
			enforced, metav1.ConditionFalse, v1alpha1.ReasonDriverTooOld, "driver 580.95.05 is older than 615"),
		"watched. Not hard: NotVerified: nothing is limited (Report); 2 pods would be": limitedNode(
			&v1alpha1.TimeSlicedMemory{Limit: v1alpha1.MemoryLimitReport, Guard: guarded}, metav1.ConditionUnknown, v1alpha1.ReasonNotVerified,
			"nothing is limited (Report); 2 pods would be"),
		"watched": limitedNode(&v1alpha1.TimeSlicedMemory{Guard: guarded}, "", "", ""),
		"none. Not hard: the agent has not reported yet; if that lasts, it is older than the policy's memory.limit": limitedNode(enforced, "", "", ""),
		"none. Not hard: LimitFailed: 2 limits remain":                                                              limitedNode(nil, metav1.ConditionFalse, v1alpha1.ReasonLimitFailed, "2 limits remain"),
	} {
		NewWithT(t).Expect(limitOf(n)).To(Equal(want))
	}
}

func TestWhySaysWhatTheDriverLetsAPodHave(t *testing.T) {
	n := limitedNode(&v1alpha1.TimeSlicedMemory{Limit: v1alpha1.MemoryLimitEnforce}, metav1.ConditionFalse, v1alpha1.ReasonForeignLimit, "")
	n.Status.MemoryLimits.Pods = []v1alpha1.PodMemoryLimit{
		{Namespace: "team", PodName: "foreign", DeviceUUID: "GPU-1", LimitBytes: 4 << 30, Reason: v1alpha1.ReasonForeignLimit},
		{Namespace: "team", PodName: "train", DeviceUUID: "GPU-1", LimitBytes: 4 << 30},
	}
	said := func(pod string) string {
		s := share{Total: 15360}
		if mib, limited := limitFor(n, pod, "team", "GPU-1"); limited {
			s.MemoryMiB, s.limited = mib, true
		}
		return s.timeSliced("one of 4 shares")
	}
	g := NewWithT(t)
	const turns = "one of 4 shares by time-slicing: all take turns, and "
	g.Expect(said("train")).To(Equal(turns + "the driver lets its pod have 4.0 GiB of the 15.0 GiB; an allocation beyond that fails with CUDA_ERROR_OUT_OF_MEMORY"))
	g.Expect(said("foreign")).To(Equal(turns + "nothing limits what one takes of the 15.0 GiB"))
	g.Expect(said("unlisted")).To(Equal(turns + "nothing limits what one takes of the 15.0 GiB"))
	n.Status.MemoryLimits.Limited = 40
	g.Expect(said("unlisted")).To(Equal(turns+"the driver limits what its pod takes of the 15.0 GiB"), "those without a limit are listed first")
	n.Status.Conditions[0].Status = metav1.ConditionTrue
	g.Expect(said("unlisted")).To(Equal(turns+"the driver limits what its pod takes of the 15.0 GiB"), "the report holds the first pods alone")
	n.Spec.Memory.Limit = v1alpha1.MemoryLimitReport
	g.Expect(said("train")).To(Equal(turns + "nothing limits what one takes of the 15.0 GiB"))
}

func TestTopShowsLimitsWhereThereAreSome(t *testing.T) {
	g := NewWithT(t)
	u := &usage.Unit{Containers: []usage.Container{
		{Name: usage.Name{Namespace: "team", Pod: "train", Container: "main"}, MemoryBytes: new(int64(37 << 30 / 10)), LimitBytes: new(int64(4 << 30))},
		{Name: usage.Name{Namespace: "team", Pod: "idle", Container: "main"}, MemoryBytes: new(int64(0))},
	}}
	var shown text
	shown.containers(u, 0)
	g.Expect(shown.String()).To(And(MatchRegexp(`MEMORY +SHARE +LIMIT +SM`), MatchRegexp(`3\.7 GiB +- +4\.0 GiB, near +- +team/train main`),
		MatchRegexp(`0\.0 GiB +- +- +- +team/idle main`)))
	u.Containers[0].LimitBytes = nil
	shown = text{}
	shown.containers(u, 0)
	g.Expect(shown.String()).NotTo(ContainSubstring("LIMIT"))
}

func TestPlanNamesPodsAboveTheirFutureLimit(t *testing.T) {
	g := NewWithT(t)
	n := newNode(t, "a", sim.T4)
	n.GPU.Status.MemoryLimits.Pods = []v1alpha1.PodMemoryLimit{
		{Namespace: "team", PodName: "large", LimitBytes: 4 << 30, Reason: v1alpha1.ReasonAboveLimit}, {Namespace: "team", PodName: "small", LimitBytes: 4 << 30},
	}
	planned := func(limit string) string {
		s := snapshotOf(n)
		applied := policy(t, "p", `{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {limit: `+limit+`}}}}`)
		var shown text
		shown.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{applied}})
		return shown.String()
	}
	g.Expect(planned("Enforce")).To(ContainSubstring(
		"by the driver, of each pod, where the node can (MemoryLimited); not before they use less than their share: team/large on a (4.0 GiB)\n"))
	g.Expect(planned("Report")).NotTo(ContainSubstring("by the driver"))
}
