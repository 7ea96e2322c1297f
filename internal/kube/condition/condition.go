// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package condition sets, finds and summarises metav1.Conditions. It is pure: no function changes its argument, and the
// time is passed in.
//
// Conditions come back sorted by type, so that equal conditions are equal lists. An unchanged condition keeps its
// lastTransitionTime: otherwise every reconcile would be a change, and a write. The messages are worded in
// internal/engine/rollout.
package condition

import (
	"cmp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Set returns the conditions with c in place of the one of its type. The time of the transition is now if the status
// changed or the condition is new, and is kept otherwise. Of its message what a reader needs is kept (format.Message).
func Set(conditions []metav1.Condition, c metav1.Condition, now time.Time) []metav1.Condition {
	c.Message = format.Message(c.Message)
	return SetInFull(conditions, c, now)
}

// MaxMessage is the longest message of a condition in characters, from the schema of metav1.Condition.
const MaxMessage = 32768

// SetInFull is Set for a message that is kept nowhere else, such as what a driver answered.
func SetInFull(conditions []metav1.Condition, c metav1.Condition, now time.Time) []metav1.Condition {
	c.Message = format.Cut(format.Sentence(strings.ToValidUTF8(c.Message, "�")), MaxMessage)
	c.LastTransitionTime = metav1.NewTime(now.Truncate(time.Second))
	if old, found := Find(conditions, c.Type); found && old.Status == c.Status && old.LastTransitionTime.Unix() > 0 { // 0: the API's default
		c.LastTransitionTime = old.LastTransitionTime
	}
	return sorted(append(Remove(conditions, c.Type), c))
}

// SetWhenTrue is SetInFull for a condition that is present only while it is true, such as Stalled: one that is not true is
// removed.
func SetWhenTrue(conditions []metav1.Condition, c metav1.Condition, now time.Time) []metav1.Condition {
	if c.Status != metav1.ConditionTrue {
		return sorted(Remove(conditions, c.Type))
	}
	return SetInFull(conditions, c, now)
}

// SetProgress returns the conditions with Reconciling and Stalled, which tell tools that know the convention of kstatus
// how an object is doing: if it is Ready, neither is true; if it is not, one of them is; if that is Unknown, both are.
// The problem is what stalls it, with status true if something does.
func SetProgress(conditions []metav1.Condition, problem metav1.Condition, now time.Time) []metav1.Condition {
	ready, _ := Find(conditions, v1alpha1.ConditionReady)
	reconciling, stalled := ready, ready
	reconciling.Type, stalled.Type = v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled
	switch {
	case ready.Status == metav1.ConditionTrue:
		reconciling.Status, reconciling.Message = metav1.ConditionFalse, "Nothing is left to do"
		stalled.Status, stalled.Message = metav1.ConditionFalse, "Nothing is left to do"
	case problem.Status == metav1.ConditionTrue:
		reconciling.Status, reconciling.Message = metav1.ConditionFalse, "Nothing more happens until something is changed, see Stalled"
		stalled.Status, stalled.Reason, stalled.Message = metav1.ConditionTrue, problem.Reason, problem.Message
	case ready.Status == metav1.ConditionFalse:
		reconciling.Status = metav1.ConditionTrue
		stalled.Status, stalled.Message = metav1.ConditionFalse, "The work goes on, see Reconciling"
	}
	return Set(Set(conditions, reconciling, now), stalled, now)
}

// Find returns the condition of a type.
func Find(conditions []metav1.Condition, conditionType string) (metav1.Condition, bool) {
	for _, c := range conditions {
		if c.Type == conditionType {
			return c, true
		}
	}
	return metav1.Condition{}, false
}

// IsTrue reports whether the condition of a type is there and true.
func IsTrue(conditions []metav1.Condition, conditionType string) bool {
	c, found := Find(conditions, conditionType)
	return found && c.Status == metav1.ConditionTrue
}

// IsTrueAt reports whether the condition of a type is true and was observed at that generation of the object or later.
func IsTrueAt(conditions []metav1.Condition, conditionType string, generation int64) bool {
	c, found := Find(conditions, conditionType)
	return found && c.Status == metav1.ConditionTrue && c.ObservedGeneration >= generation
}

// Remove returns the conditions without the one of a type.
func Remove(conditions []metav1.Condition, conditionType string) []metav1.Condition {
	kept := make([]metav1.Condition, 0, len(conditions)+1)
	for _, c := range conditions {
		if c.Type != conditionType {
			kept = append(kept, c)
		}
	}
	return kept
}

func sorted(conditions []metav1.Condition) []metav1.Condition {
	slices.SortFunc(conditions, func(a, b metav1.Condition) int { return cmp.Compare(a.Type, b.Type) })
	return conditions
}
