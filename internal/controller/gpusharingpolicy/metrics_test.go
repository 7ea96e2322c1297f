// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

func TestMetrics(t *testing.T) {
	g := NewWithT(t)
	registry := prometheus.NewPedanticRegistry()
	m := newMetrics()
	registry.MustRegister(m)
	g.Expect(testutil.GatherAndCompare(registry, strings.NewReader(""))).To(Succeed(), "nothing was decided yet")

	m.decided(rollout.Decision{
		Nodes: []rollout.NodeState{
			{Node: "a", Policy: "research", State: node.UpToDate},
			{Node: "b", Policy: "research", State: node.UpToDate},
			{Node: "c", Policy: "research", State: node.Draining},
			{Node: "d", State: node.Selecting},
			{Node: "e", State: node.UpToDate}, // is restored
			{Node: "f", State: node.Selecting, Reason: v1alpha1.ReasonWaitingForBudget},
		},
		Policies: map[string]v1alpha1.GPUSharingPolicyStatus{
			"research": {
				Conditions: []metav1.Condition{{
					Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(time.Unix(1_800_000_000, 0)),
				}},
				Resources: []v1alpha1.ResourceCount{{Name: "nvidia.com/gpu", Expected: 12, Advertised: 9, Oversubscription: 4}},
			},
			"idle": {Conditions: []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue}}},
		},
	})
	by := action.PolicyRef{Name: "research"}
	failed := &v1alpha1.FailedChange{Hash: "w", Reason: v1alpha1.ReasonNotAdvertised, Time: metav1.NewTime(time.Unix(1_800_000_100, 0))}
	late := &v1alpha1.FailedChange{Hash: "w", Reason: v1alpha1.ReasonDrainTimedOut}
	report := func(f *v1alpha1.FailedChange) action.Report {
		return action.Report{Policy: by, Status: v1alpha1.GPUNodeStatus{Rollout: v1alpha1.RolloutStatus{Failed: f}}}
	}
	m.did(action.Evict{Policy: by}, nil)
	m.refusal(action.Evict{Policy: by})
	m.did(report(failed), nil)
	m.did(report(failed), failed) // on its way back
	m.did(report(late), nil)
	g.Expect(testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP gpusharing_evictions_refused_total Evictions that a PodDisruptionBudget refused. Each is asked for again.
# TYPE gpusharing_evictions_refused_total counter
gpusharing_evictions_refused_total{policy="idle"} 0
gpusharing_evictions_refused_total{policy="research"} 1
# HELP gpusharing_evictions_total Pods whose eviction the API server accepted.
# TYPE gpusharing_evictions_total counter
gpusharing_evictions_total{policy="idle"} 0
gpusharing_evictions_total{policy="research"} 1
# HELP gpusharing_last_rollback_timestamp_seconds When a change failed on a node last, which then goes back to its last good state, in seconds since 1970, by the reason of the failure.
# TYPE gpusharing_last_rollback_timestamp_seconds gauge
gpusharing_last_rollback_timestamp_seconds{policy="research",reason="NotAdvertised"} 1.8000001e+09
# HELP gpusharing_nodes Nodes that a policy governs, or that go back to the state in which they were found (no policy), by how far they are.
# TYPE gpusharing_nodes gauge
gpusharing_nodes{policy="",state="Selecting"} 2
gpusharing_nodes{policy="",state="UpToDate"} 1
gpusharing_nodes{policy="research",state="Draining"} 1
gpusharing_nodes{policy="research",state="UpToDate"} 2
# HELP gpusharing_released_node 1 for each node (gpunode) that no policy governs any more and that is not restored yet, by how far it is; absent while it waits for a slot in the budget.
# TYPE gpusharing_released_node gauge
gpusharing_released_node{gpunode="d",state="Selecting"} 1
# HELP gpusharing_resource_advertised What the nodes of a policy advertise of an extended resource now.
# TYPE gpusharing_resource_advertised gauge
gpusharing_resource_advertised{policy="research",resource="nvidia.com/gpu"} 9
# HELP gpusharing_resource_expected What the nodes of a policy advertise of an extended resource once all of them are ready.
# TYPE gpusharing_resource_expected gauge
gpusharing_resource_expected{policy="research",resource="nvidia.com/gpu"} 12
# HELP gpusharing_resource_oversubscription How many containers share what advertises one of an extended resource, the highest among the nodes; 1 if none do.
# TYPE gpusharing_resource_oversubscription gauge
gpusharing_resource_oversubscription{policy="research",resource="nvidia.com/gpu"} 4
# HELP gpusharing_rollbacks_total Changes that failed on a node, which then goes back to its last good state, by the reason of the failure.
# TYPE gpusharing_rollbacks_total counter
gpusharing_rollbacks_total{policy="idle",reason="ApplyTimedOut"} 0
gpusharing_rollbacks_total{policy="idle",reason="NotAdvertised"} 0
gpusharing_rollbacks_total{policy="research",reason="ApplyTimedOut"} 0
gpusharing_rollbacks_total{policy="research",reason="NotAdvertised"} 1
# HELP gpusharing_rollout_start_timestamp_seconds Since when a policy is not ready, in seconds since 1970; absent for one that is, and for one that is paused or waits for its maintenance window, unless a node is blocked. Its age is time() minus this.
# TYPE gpusharing_rollout_start_timestamp_seconds gauge
gpusharing_rollout_start_timestamp_seconds{policy="research"} 1.8e+09
`))).To(Succeed())
	problems, err := testutil.GatherAndLint(registry)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(problems).To(BeEmpty())

	m.decided(rollout.Decision{Policies: map[string]v1alpha1.GPUSharingPolicyStatus{"idle": {}}})
	count, err := testutil.GatherAndCount(registry)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(count).To(Equal(4), "what was told of a policy goes with it")
}

// TestAPolicyWithoutNodesIsNotWaitedFor if it says so: a pool that an autoscaler scaled to zero is ready, so no alert on
// a policy that is not ready fires. One that names no node by mistake is.
func TestAPolicyWithoutNodesIsNotWaitedFor(t *testing.T) {
	g := NewWithT(t)
	registry := prometheus.NewPedanticRegistry()
	m := newMetrics()
	registry.MustRegister(m)
	idle := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "idle"}, Spec: v1alpha1.GPUSharingPolicySpec{
		Sharing:     v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4}},
		Autoscaling: v1alpha1.Autoscaling{EmptyPool: v1alpha1.EmptyPoolExpected},
	}}
	decide := func() rollout.Decision {
		return rollout.Decide(cluster.Snapshot{Now: time.Unix(1_800_000_000, 0), Policies: []v1alpha1.GPUSharingPolicy{idle}})
	}
	g.Expect(decide().Policies).To(HaveKey("idle"))
	m.decided(decide())
	g.Expect(testutil.GatherAndCount(registry, "gpusharing_evictions_total")).To(Equal(1))
	g.Expect(testutil.GatherAndCount(registry, "gpusharing_rollout_start_timestamp_seconds")).To(BeZero())
	idle.Spec.Autoscaling.EmptyPool = v1alpha1.EmptyPoolUnexpected
	m.decided(decide())
	g.Expect(testutil.GatherAndCount(registry, "gpusharing_rollout_start_timestamp_seconds")).To(Equal(1))
}

// TestAPolicyThatWaitsAsItsUserIntendsIsNotOverdue: GPUSharingPolicyNotReady goes by this series. A paused policy, or
// one with a weekly window, is not ready for as long as its user wants.
func TestAPolicyThatWaitsAsItsUserIntendsIsNotOverdue(t *testing.T) {
	for reason, series := range map[string]int{v1alpha1.ReasonOutsideWindow: 0, v1alpha1.ReasonPaused: 0, v1alpha1.ReasonInvalidWindow: 1, v1alpha1.ReasonGPUInUse: 1} {
		t.Run(reason, func(t *testing.T) {
			g := NewWithT(t)
			registry := prometheus.NewPedanticRegistry()
			m := newMetrics()
			registry.MustRegister(m)
			m.decided(rollout.Decision{Policies: map[string]v1alpha1.GPUSharingPolicyStatus{"mig": {Conditions: []metav1.Condition{{
				Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: reason, LastTransitionTime: metav1.NewTime(time.Unix(1_800_000_000, 0)),
			}}}}})
			g.Expect(testutil.GatherAndCount(registry, "gpusharing_rollout_start_timestamp_seconds")).To(Equal(series))
		})
	}
}

// TestAPausedPolicyWithABlockedNodeIsOverdue: Ready says Paused as soon as one node waits for that, whatever the others
// are. A node that no longer advertises what it did is not as its user asked, and no other alert names it:
// GPUSharingNodesFailed is for Failed and Unsupported.
func TestAPausedPolicyWithABlockedNodeIsOverdue(t *testing.T) {
	g := NewWithT(t)
	registry := prometheus.NewPedanticRegistry()
	m := newMetrics()
	registry.MustRegister(m)
	m.decided(rollout.Decision{Policies: map[string]v1alpha1.GPUSharingPolicyStatus{"mig": {
		Nodes: v1alpha1.NodeCounts{Matched: 3, Ready: 1, Updated: 1, Blocked: 1},
		Pending: []v1alpha1.PendingNode{
			{NodeName: "a", State: string(node.Degraded), Reason: v1alpha1.ReasonNotAdvertised}, {NodeName: "b", Reason: v1alpha1.ReasonPaused},
		},
		Conditions: []metav1.Condition{{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonPaused, LastTransitionTime: metav1.NewTime(time.Unix(1_800_000_000, 0)),
		}},
	}}})
	g.Expect(testutil.GatherAndCount(registry, "gpusharing_rollout_start_timestamp_seconds")).To(Equal(1))
}
