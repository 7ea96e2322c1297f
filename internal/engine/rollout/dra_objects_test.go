// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// TestAPodThatDoesNotStartOnItsDevice is known by its claims: also one that ran before its node was rebooted.
func TestAPodThatDoesNotStartOnItsDevice(t *testing.T) {
	ready := []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	claimed := corev1.PodStatus{ExtendedResourceClaimStatus: &corev1.PodExtendedResourceClaimStatus{}}
	for name, c := range map[string]struct {
		pod  corev1.Pod
		want bool
	}{
		"created just now":      {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}, Status: claimed}, true},
		"running and ready":     {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}, Status: corev1.PodStatus{Phase: corev1.PodRunning, ExtendedResourceClaimStatus: claimed.ExtendedResourceClaimStatus, Conditions: ready}}, false},
		"after a reboot":        {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}, Status: corev1.PodStatus{Phase: corev1.PodRunning, ExtendedResourceClaimStatus: claimed.ExtendedResourceClaimStatus}}, true},
		"by a claim of its own": {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a", ResourceClaims: []corev1.PodResourceClaim{{}}}}, true},
		"without a claim":       {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}}, false},
		"on no node":            {corev1.Pod{Status: claimed}, false},
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(cluster.PodOf(&c.pod, &cluster.Programs{}).Starting).To(Equal(c.want))
		})
	}
}

// TestTheObjectsOfDRAAreJoined to what a decision needs of the cluster, of each node and of its pods.
func TestTheObjectsOfDRAAreJoined(t *testing.T) {
	g := NewWithT(t)
	read := func(text string) []unstructured.Unstructured {
		var o unstructured.Unstructured
		g.Expect(yaml.Unmarshal([]byte(text), &o.Object)).To(Succeed())
		return []unstructured.Unstructured{o}
	}
	rule := dra.NewTaintRule("a", time.Unix(1_800_000_000, 0))
	s := cluster.Snapshot{Nodes: []cluster.Node{{Name: "a", Pods: []cluster.Pod{{Namespace: "team", Name: "train", UID: "uid-1"}, {UID: "uid-2"}}}, {Name: "b"}}}
	cluster.DRAObjects{
		ServesClasses: true, ServesTaintRules: true, TaintRules: []unstructured.Unstructured{*rule},
		Slices: read(`{metadata: {name: s}, spec: {driver: gpu.nvidia.com, nodeName: a, pool: {name: a, generation: 1, resourceSliceCount: 1},
			devices: [{name: gpu-0, attributes: {type: {string: gpu}, uuid: {string: GPU-a}}}]}}`),
		Claims: read(`{metadata: {namespace: team, name: one}, spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.nvidia.com}}]}},
			status: {reservedFor: [{resource: pods, name: train, uid: uid-1}],
			allocation: {devices: {results: [{driver: gpu.nvidia.com, pool: a, device: gpu-0}]}}}}`),
		Classes: read(`{metadata: {name: gpu.nvidia.com}, spec: {extendedResourceName: nvidia.com/gpu}}`),
	}.Read().AddTo(&s)
	a, b := s.Nodes[0], s.Nodes[1]
	g.Expect(s.Plugin.StackOf(&a)).To(Equal(dra.DRADriver))
	g.Expect(s.Plugin.StackOf(&b)).To(Equal(dra.DevicePlugin))
	g.Expect(a.Offered(dra.DRADriver)).To(Equal(map[string]int64{"nvidia.com/gpu": 1}))
	g.Expect(a.Claims).To(HaveLen(1))
	g.Expect([]string{a.Pods[0].Claim, a.Pods[1].Claim}).To(Equal([]string{"team/one", ""}))
	g.Expect(a.DevicesTaintedAt.Unix()).To(Equal(int64(1_800_000_000)))
	g.Expect(s.DRA.DevicesTaintedOn).To(Equal([]string{"a"}))
	g.Expect(s.DRA.Named).To(Equal([]string{"gpu.nvidia.com"}))
	g.Expect(s.DRA.Classes).To(ConsistOf(HaveField("Resource", "nvidia.com/gpu")))
	g.Expect(b).To(Equal(cluster.Node{Name: "b"}))
}

// TestWhoseADeviceTaintRuleIs: one of the operator's that another client edited is no other's, and one that is being
// deleted, or was deleted a moment ago, keeps nothing off.
func TestWhoseADeviceTaintRuleIs(t *testing.T) {
	g := NewWithT(t)
	rule := func(node string, change func(*unstructured.Unstructured)) unstructured.Unstructured {
		r := dra.NewTaintRule(node, time.Unix(1_800_000_000, 0))
		r.SetUID(types.UID(node))
		change(r)
		return *r
	}
	read := cluster.DRAObjects{
		Deleted: map[types.UID]bool{"gone": true},
		TaintRules: []unstructured.Unstructured{
			rule("whole", func(*unstructured.Unstructured) {}),
			rule("edited", func(r *unstructured.Unstructured) {
				g.Expect(unstructured.SetNestedField(r.Object, "NoExecute", "spec", "taint", "effect")).To(Succeed())
			}),
			rule("ending", func(r *unstructured.Unstructured) { r.SetDeletionTimestamp(new(metav1.Now())) }),
			rule("gone", func(*unstructured.Unstructured) {}),
			rule("taken", func(r *unstructured.Unstructured) { r.SetLabels(nil) }),
		},
	}.Read()
	g.Expect(read.Cluster.DevicesTaintedOn).To(Equal([]string{"whole"}))
	g.Expect(read.Cluster.Edited).To(Equal([]string{"edited"}))
	g.Expect(read.Rules).To(Equal(map[string]types.UID{"whole": "whole", "edited": "edited"}))
	g.Expect(read.Nodes).To(HaveLen(2))
	g.Expect(read.Nodes["whole"].DevicesTaintedAt.IsZero()).To(BeFalse())
	g.Expect(read.Nodes["taken"].TaintRuleTaken).To(BeTrue())
}
