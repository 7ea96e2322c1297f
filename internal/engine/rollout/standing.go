// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Undecided returns the status of each policy, by name, while the controller cannot decide: what was reported last, but
// Ready is Unknown, because nothing tells whether it still is so. The message says what the controller waits for and
// what to look at.
func Undecided(policies []v1alpha1.GPUSharingPolicy, message string, now time.Time) map[string]v1alpha1.GPUSharingPolicyStatus {
	const length = 1024
	all := make(map[string]v1alpha1.GPUSharingPolicyStatus, len(policies))
	for i := range policies {
		s := *policies[i].Status.DeepCopy()
		s.NodeGroups, s.Conditions = nil, ownConditions(s.Conditions)
		s.Pending = s.Pending[:min(len(s.Pending), v1alpha1.MostPending)] // earlier versions listed more, which the API server refuses now
		for _, kind := range []string{v1alpha1.ConditionAccepted, v1alpha1.ConditionReady} {
			last, reported := condition.Find(s.Conditions, kind)
			if reported && last.Status != metav1.ConditionUnknown && kind == v1alpha1.ConditionAccepted {
				continue
			}
			s.Conditions = condition.Set(s.Conditions, metav1.Condition{
				Type: kind, Status: metav1.ConditionUnknown, ObservedGeneration: last.ObservedGeneration,
				Reason: v1alpha1.ReasonClusterNotRead, Message: format.Cut(message, length),
			}, now)
		}
		s.Conditions = condition.SetProgress(s.Conditions, metav1.Condition{}, now)
		all[policies[i].Name] = s
	}
	return all
}
