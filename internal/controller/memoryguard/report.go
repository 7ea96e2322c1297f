// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// maxNamed is how many nodes the condition of a policy names.
const maxNamed = 3

// report applies the condition MemoryPressure of a policy, which is there if there are findings or nodes that are not
// measured, and nothing else of its status.
func (r *reconciliation) report(ctx context.Context, policy *v1alpha1.GPUSharingPolicy, findings []finding, unmeasured []string) error {
	is := metav1.Condition{Type: v1alpha1.ConditionMemoryPressure, ObservedGeneration: policy.Generation}
	var was, own []metav1.Condition
	if c, reported := condition.Find(policy.Status.Conditions, is.Type); reported {
		was = append(was, c)
	}
	switch {
	case len(findings) > 0:
		is.Status, is.Reason, is.Message = metav1.ConditionTrue, v1alpha1.ReasonContainerOverShare, messageOf(findings)
		own = condition.Set(was, is, r.now)
	case len(unmeasured) > 0:
		is.Status, is.Reason, is.Message = metav1.ConditionUnknown, v1alpha1.ReasonNotMeasured, unmeasuredMessage(unmeasured)
		own = condition.Set(was, is, r.now)
	}
	if equality.Semantic.DeepEqual(was, own) {
		return nil
	}
	want := ac.GPUSharingPolicy(policy.Name)
	if len(own) > 0 {
		status, err := ssa.Configuration[ac.GPUSharingPolicyStatusApplyConfiguration](v1alpha1.GPUSharingPolicyStatus{Conditions: own})
		if err != nil {
			return err
		}
		want.WithStatus(status)
	}
	_, err := ssa.ApplyStatus(ctx, ssa.Owner{Client: r.client, Name: FieldManager}, policy, want, ac.ExtractGPUSharingPolicyStatus)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("reporting on policy %s: %w", policy.Name, err)
	}
	return nil
}

func unmeasuredMessage(nodes []string) string {
	return fmt.Sprintf("The agents of %d nodes (%s) have not reported for two minutes that they measure for the memory guard. Wait for an update of their "+
		"DaemonSet, or look at their pods, or at GPUs whose memory is unknown", len(nodes), format.Few(nodes, maxNamed))
}

func messageOf(findings []finding) string {
	lines := make([]string, 0, len(findings))
	for _, f := range findings {
		text := f.text
		if f.outcome != "" {
			text += "; " + f.outcome // at the end, which a message keeps
		}
		lines = append(lines, text)
	}
	return format.Fit(lines, format.MostMessage, func(i int) string {
		return fmt.Sprintf("%d more in status.memoryPressure of GPUNodes", len(lines)-i)
	})
}

// announce tells of an incident on the pod and on the policy.
func (r *reconciliation) announce(of incident, kind, reason, action, note string) {
	if of.pod != nil {
		r.events.Eventf(of.pod, of.policy, kind, reason, action, "%s", format.Message(note))
	}
	r.events.Eventf(of.policy, of.node, kind, reason, action, "%s", format.Message(note))
}
