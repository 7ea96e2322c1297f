// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// ExpectStatusSane checks what holds for the status of every object of ours at any time, whatever happened before.
func ExpectStatusSane(tb testing.TB, obj client.Object) {
	tb.Helper()
	g := NewWithT(tb)
	name := fmt.Sprintf("%T %s", obj, obj.GetName())
	switch o := obj.(type) {
	case *v1alpha1.GPUSharingPolicy:
		expectConditionsSane(g, name, o.Generation, o.Status.Conditions, v1alpha1.ConditionAccepted, v1alpha1.ConditionReady)
		expectPolicySane(g, name, o.Status)
	case *v1alpha1.GPUNode:
		expectConditionsSane(g, name, o.Generation, o.Status.Conditions,
			v1alpha1.ConditionReady, v1alpha1.ConditionDiscovered, v1alpha1.ConditionApplied)
	default:
		tb.Fatalf("%s is no object of ours", name)
	}
}

// expectConditionsSane checks that the conditions that always belong there are there, once somebody wrote a status; that
// none says anything of a generation that does not exist yet; and that Ready is not claimed for an older generation, nor
// together with Stalled.
func expectConditionsSane(g Gomega, name string, generation int64, conditions []metav1.Condition, always ...string) {
	if len(conditions) == 0 {
		return
	}
	for _, conditionType := range always {
		g.Expect(meta.FindStatusCondition(conditions, conditionType)).
			NotTo(BeNil(), "%s has conditions but not %s", name, conditionType)
	}
	for _, c := range conditions {
		about := fmt.Sprintf("condition %s of %s: %+v", c.Type, name, c)
		g.Expect(c.Reason).NotTo(BeEmpty(), about)
		g.Expect(c.Message).NotTo(BeEmpty(), about)
		g.Expect(c.ObservedGeneration).To(BeNumerically("<=", generation), about)
	}
	ready := meta.FindStatusCondition(conditions, v1alpha1.ConditionReady)
	if ready == nil || ready.Status != metav1.ConditionTrue {
		return
	}
	g.Expect(ready.ObservedGeneration).To(Equal(generation), "%s is Ready, but as an older generation", name)
	g.Expect(meta.IsStatusConditionTrue(conditions, v1alpha1.ConditionStalled)).
		To(BeFalse(), "%s is Ready and Stalled at the same time", name)
}

// expectPolicySane checks that the counts add up, that lists are sorted and that Ready means what it says.
func expectPolicySane(g Gomega, name string, status v1alpha1.GPUSharingPolicyStatus) {
	n := status.Nodes
	g.Expect(n.Ready+n.Changing+n.Waiting+n.Failed+n.Conflicted).
		To(Equal(n.Matched), "the node counts of %s do not add up: %+v", name, n)
	g.Expect(len(status.Pending)).To(BeNumerically(">=", min(n.Changing+n.Waiting+n.Failed, v1alpha1.MostPending)),
		"%s lists too few of its nodes that are not ready: %+v", name, status)
	g.Expect(slices.IsSortedFunc(status.Resources, func(a, b v1alpha1.ResourceCount) int {
		return cmp.Compare(a.Name, b.Name)
	})).To(BeTrue(), "the resources of %s are not sorted: %+v", name, status.Resources)
	if !meta.IsStatusConditionTrue(status.Conditions, v1alpha1.ConditionReady) {
		return
	}
	for _, r := range status.Resources {
		g.Expect(r.Advertised).To(BeNumerically(">=", r.Expected), "%s is Ready, yet lacks %s", name, r.Name)
	}
	g.Expect(n.Changing+n.Waiting+n.Failed).To(BeZero(), "%s is Ready, yet has nodes that are not: %+v", name, n)
}
