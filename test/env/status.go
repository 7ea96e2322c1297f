// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// ExpectStatusSane checks what holds for the status of every object of ours at any time, whatever happened before.
func ExpectStatusSane(tb testing.TB, obj client.Object) {
	tb.Helper()
	g := NewWithT(tb)
	name := fmt.Sprintf("%T %s", obj, obj.GetName())
	switch o := obj.(type) {
	case *v1alpha1.GPUSharingPolicy:
		expectConditionsSane(g, name, o.Generation, o.Status.ObservedGeneration, o.Status.Conditions, v1alpha1.ConditionAccepted, v1alpha1.ConditionReady)
		expectPolicySane(g, name, o.Status)
		expectKstatus(tb, o, o.Status.ObservedGeneration, o.Status.Conditions)
	case *v1alpha1.GPUNode:
		expectConditionsSane(g, name, o.Generation, o.Status.ObservedGeneration, o.Status.Conditions, v1alpha1.ConditionReady)
		if _, reported := condition.Find(o.Status.Conditions, v1alpha1.ConditionDiscovered); reported {
			expectConditionsSane(g, name, o.Generation, o.Status.ObservedGeneration, o.Status.Conditions, v1alpha1.ConditionApplied)
		}
		expectKstatus(tb, o, o.Status.ObservedGeneration, o.Status.Conditions)
	default:
		tb.Fatalf("%s is no object of ours", name)
	}
}

// Kstatus returns what the library kstatus, and so Flux, Argo CD and kpt, conclude from an object of ours.
func Kstatus(tb testing.TB, obj client.Object) status.Status {
	tb.Helper()
	g := NewWithT(tb)
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	g.Expect(err).NotTo(HaveOccurred())
	u := &unstructured.Unstructured{Object: content}
	u.SetAPIVersion(v1alpha1.SchemeGroupVersion.String())
	u.SetKind(strings.TrimPrefix(fmt.Sprintf("%T", obj), "*v1alpha1."))
	result, err := status.Compute(u)
	g.Expect(err).NotTo(HaveOccurred())
	return result.Status
}

// expectKstatus checks that kstatus concludes from an object what its conditions say.
func expectKstatus(tb testing.TB, obj client.Object, observed int64, conditions []metav1.Condition) {
	tb.Helper()
	want := status.InProgressStatus
	switch {
	case observed < obj.GetGeneration():
	case meta.IsStatusConditionTrue(conditions, v1alpha1.ConditionReady):
		want = status.CurrentStatus
	case meta.IsStatusConditionTrue(conditions, v1alpha1.ConditionStalled):
		want = status.FailedStatus
	}
	NewWithT(tb).Expect(Kstatus(tb, obj)).To(Equal(want), "%T %s: %+v", obj, obj.GetName(), conditions)
}

// expectConditionsSane checks that the conditions that always belong there are there, once a status was written; that
// none says anything of a generation that does not exist yet; that Ready is not claimed for an older generation; and
// that exactly one of Ready, Reconciling and Stalled is true, or all are Unknown.
func expectConditionsSane(g Gomega, name string, generation, observed int64, conditions []metav1.Condition, always ...string) {
	if len(conditions) == 0 || observed == 0 { // the defaults of the API: the controller has not reported
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
		g.Expect(c.Message).To(Equal(format.Sentence(c.Message)), about)
		if c.Type == v1alpha1.ConditionReady || c.Type == v1alpha1.ConditionAccepted { // what an agent says of its node may be longer
			g.Expect(c.Message).To(Equal(format.Message(c.Message)), about)
		}
		g.Expect(c.ObservedGeneration).To(BeNumerically("<=", generation), about)
	}
	ready := meta.FindStatusCondition(conditions, v1alpha1.ConditionReady)
	if ready == nil {
		return
	}
	states := map[metav1.ConditionStatus]int{}
	for _, conditionType := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled} {
		c := meta.FindStatusCondition(conditions, conditionType)
		g.Expect(c).NotTo(BeNil(), "%s has no condition %s", name, conditionType)
		states[c.Status]++
	}
	g.Expect(states[metav1.ConditionTrue] == 1 || states[metav1.ConditionUnknown] == 3).
		To(BeTrue(), "%s is not one of Ready, Reconciling and Stalled: %+v", name, conditions)
	if ready.Status == metav1.ConditionTrue && observed == generation {
		g.Expect(ready.ObservedGeneration).To(Equal(generation), "%s is Ready, but as an older generation", name)
	}
}

// expectPolicySane checks that the counts add up, that lists are sorted and that Ready means what it says.
func expectPolicySane(g Gomega, name string, s v1alpha1.GPUSharingPolicyStatus) {
	n := s.Nodes
	g.Expect(n.Ready+n.Changing+n.Waiting+n.Failed+n.Conflicted).
		To(Equal(n.Matched), "the node counts of %s do not add up: %+v", name, n)
	for _, n := range s.Pending {
		g.Expect(n.Message).To(Equal(format.Message(n.Message)), "%s of %s", n.NodeName, name)
	}
	g.Expect(len(s.Pending)).To(BeNumerically(">=", min(n.Changing+n.Waiting+n.Failed, v1alpha1.MostPending)),
		"%s lists too few of its nodes that are not ready: %+v", name, s)
	g.Expect(slices.IsSortedFunc(s.Resources, func(a, b v1alpha1.ResourceCount) int {
		return cmp.Compare(a.Name, b.Name)
	})).To(BeTrue(), "the resources of %s are not sorted: %+v", name, s.Resources)
	if !meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionReady) {
		return
	}
	for _, r := range s.Resources {
		g.Expect(r.Advertised).To(BeNumerically(">=", r.Expected), "%s is Ready, yet lacks %s", name, r.Name)
	}
	g.Expect(n.Changing+n.Waiting+n.Failed).To(BeZero(), "%s is Ready, yet has nodes that are not: %+v", name, n)
}
