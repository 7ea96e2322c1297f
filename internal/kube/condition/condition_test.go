// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package condition_test

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

var (
	earlier = time.Date(2026, 8, 1, 10, 0, 0, 0, time.UTC)
	now     = earlier.Add(time.Hour)
)

func cond(conditionType string, status metav1.ConditionStatus, reason string, at time.Time) metav1.Condition {
	return metav1.Condition{
		Type: conditionType, Status: status, Reason: reason, Message: reason + " it is",
		ObservedGeneration: 3, LastTransitionTime: metav1.NewTime(at),
	}
}

func TestSet(t *testing.T) {
	old := cond("B", metav1.ConditionFalse, "Busy", earlier)
	tests := map[string]struct {
		before []metav1.Condition
		set    metav1.Condition
		after  []metav1.Condition
	}{
		"adds a condition that is new, at its place in the order": {
			before: []metav1.Condition{old, cond("C", metav1.ConditionTrue, "Fine", earlier)},
			set:    cond("A", metav1.ConditionTrue, "Fine", time.Time{}),
			after: []metav1.Condition{
				cond("A", metav1.ConditionTrue, "Fine", now), old, cond("C", metav1.ConditionTrue, "Fine", earlier),
			},
		},
		"keeps the time of transition while the status is the same": {
			before: []metav1.Condition{old},
			set:    cond("B", metav1.ConditionFalse, "Draining", time.Time{}),
			after:  []metav1.Condition{cond("B", metav1.ConditionFalse, "Draining", earlier)},
		},
		"gives a time to the API's default, which has none": {
			before: []metav1.Condition{cond("B", metav1.ConditionUnknown, "AwaitingReport", time.Unix(0, 0))},
			set:    cond("B", metav1.ConditionUnknown, "Busy", time.Time{}),
			after:  []metav1.Condition{cond("B", metav1.ConditionUnknown, "Busy", now)},
		},
		"takes the new time when the status changes": {
			before: []metav1.Condition{old},
			set:    cond("B", metav1.ConditionTrue, "Fine", time.Time{}),
			after:  []metav1.Condition{cond("B", metav1.ConditionTrue, "Fine", now)},
		},
		"gives a time to a condition that had none": {
			before: []metav1.Condition{cond("B", metav1.ConditionFalse, "Busy", time.Time{})},
			set:    cond("B", metav1.ConditionFalse, "Busy", time.Time{}),
			after:  []metav1.Condition{cond("B", metav1.ConditionFalse, "Busy", now)},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			untouched := append([]metav1.Condition(nil), tc.before...)
			g.Expect(condition.Set(tc.before, tc.set, now.Add(123*time.Millisecond))).To(Equal(tc.after))
			g.Expect(tc.before).To(Equal(untouched), "the argument is left alone")
		})
	}
}

// TestSetWritesMessages as format.Message says.
func TestSetWritesMessages(t *testing.T) {
	g := NewWithT(t)
	c := cond("A", metav1.ConditionTrue, "Fine", now)
	c.Message = "stderr: " + strings.Repeat("ü", 2*format.MostMessage)
	got := condition.Set(nil, c, now)[0].Message
	g.Expect(got).To(HavePrefix("Stderr: ü"))
	g.Expect(utf8.RuneCountInString(got)).To(BeNumerically("<=", format.MostMessage))
	c.Message = "stderr: \xff" + strings.Repeat("ü", condition.MaxMessage)
	got = condition.SetInFull(nil, c, now)[0].Message
	g.Expect(got).To(And(HavePrefix("Stderr: �ü"), HaveSuffix("ü…")))
	g.Expect(utf8.RuneCountInString(got)).To(Equal(condition.MaxMessage), "what the API refuses is cut")
}

func TestSetWhenTrue(t *testing.T) {
	g := NewWithT(t)
	stalled := cond("Stalled", metav1.ConditionTrue, "LayoutDoesNotFit", earlier)
	g.Expect(condition.SetWhenTrue(nil, stalled, earlier)).To(ConsistOf(stalled))

	stalled.Status = metav1.ConditionFalse
	present := []metav1.Condition{cond("Stalled", metav1.ConditionTrue, "LayoutDoesNotFit", earlier)}
	g.Expect(condition.SetWhenTrue(present, stalled, now)).To(BeEmpty())
	g.Expect(present).To(HaveLen(1))
}

func TestIsTrueAt(t *testing.T) {
	g := NewWithT(t)
	conditions := []metav1.Condition{cond("Ready", metav1.ConditionTrue, "Ready", now), cond("Stalled", metav1.ConditionFalse, "No", now)}
	g.Expect(condition.IsTrue(conditions, "Ready")).To(BeTrue())
	g.Expect(condition.IsTrue(conditions, "Stalled")).To(BeFalse())
	g.Expect(condition.IsTrue(conditions, "Missing")).To(BeFalse())
	g.Expect(condition.IsTrueAt(conditions, "Ready", 3)).To(BeTrue())
	g.Expect(condition.IsTrueAt(conditions, "Ready", 4)).To(BeFalse(), "observed before the spec changed")
}

func TestSetProgress(t *testing.T) {
	problem := cond("Stalled", metav1.ConditionTrue, "NoRoom", time.Time{})
	for name, test := range map[string]struct {
		ready, reconciling, stalled metav1.ConditionStatus
		problem                     metav1.Condition
	}{
		"done":                   {ready: metav1.ConditionTrue, reconciling: metav1.ConditionFalse, stalled: metav1.ConditionFalse},
		"done in spite of that":  {ready: metav1.ConditionTrue, problem: problem, reconciling: metav1.ConditionFalse, stalled: metav1.ConditionFalse},
		"at work":                {ready: metav1.ConditionFalse, reconciling: metav1.ConditionTrue, stalled: metav1.ConditionFalse},
		"nothing goes on":        {ready: metav1.ConditionFalse, problem: problem, reconciling: metav1.ConditionFalse, stalled: metav1.ConditionTrue},
		"not known":              {ready: metav1.ConditionUnknown, reconciling: metav1.ConditionUnknown, stalled: metav1.ConditionUnknown},
		"not known what goes on": {ready: metav1.ConditionUnknown, problem: problem, reconciling: metav1.ConditionFalse, stalled: metav1.ConditionTrue},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			after := condition.SetProgress([]metav1.Condition{cond("Ready", test.ready, "Why", earlier)}, test.problem, now)
			g.Expect(after).To(HaveLen(3))
			for i, want := range []metav1.ConditionStatus{test.ready, test.reconciling, test.stalled} {
				g.Expect(after[i].Type).To(Equal([]string{"Ready", "Reconciling", "Stalled"}[i]))
				g.Expect(after[i].Status).To(Equal(want), after[i].Type)
				g.Expect(after[i].ObservedGeneration).To(Equal(int64(3)))
				g.Expect(after[i].Message).NotTo(BeEmpty())
			}
			if test.stalled == metav1.ConditionTrue {
				g.Expect(after[2].Reason).To(Equal("NoRoom"))
			}
		})
	}
}
