// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// report applies what each policy reports of its node groups: status.nodeGroups and the condition
// AutoscalingConfigured, and nothing else of the status.
func (c *Controller) report(ctx context.Context, s *autoscaling.Snapshot, advice autoscaling.Advice) error {
	var errs []error
	for i := range s.Policies {
		p := &s.Policies[i]
		groups := advice.Groups[p.Name]
		is, requested := autoscaling.Condition(groups)
		errs = append(errs, c.reportPolicy(ctx, p, autoscaling.Listed(groups), is, requested))
	}
	return errors.Join(errs...)
}

// reportUnread reports that nothing is known of node groups, on the policies that have some.
func (c *Controller) reportUnread(ctx context.Context, message string) error {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.client.List(ctx, policies); err != nil {
		return fmt.Errorf("reading policies: %w", err)
	}
	var errs []error
	for i := range policies.Items {
		p := &policies.Items[i]
		if len(p.Status.NodeGroups) > 0 || p.Spec.Autoscaling.Mode == v1alpha1.AutoscalingModeManage {
			errs = append(errs, c.reportPolicy(ctx, p, p.Status.NodeGroups, metav1.Condition{
				Type: v1alpha1.ConditionAutoscalingConfigured, Status: metav1.ConditionUnknown, Reason: v1alpha1.ReasonClusterNotRead, Message: format.Cut(message, longestUnread),
			}, true))
		}
	}
	return errors.Join(errs...)
}

func (c *Controller) reportPolicy(
	ctx context.Context, p *v1alpha1.GPUSharingPolicy, groups []v1alpha1.NodeGroupStatus, is metav1.Condition, requested bool,
) error {
	was, reported := condition.Find(p.Status.Conditions, is.Type)
	if !requested {
		was, reported = condition.Find(p.Status.Conditions, v1alpha1.ConditionAutoscalingConfigured)
	}
	own := v1alpha1.GPUSharingPolicyStatus{NodeGroups: groups}
	if requested {
		is.ObservedGeneration = p.Generation
		own.Conditions = condition.Set(p.Status.Conditions, is, c.clock.Now())
		is, _ = condition.Find(own.Conditions, is.Type)
		own.Conditions = []metav1.Condition{is}
	}
	if reported == requested && equality.Semantic.DeepEqual(was, is) && equality.Semantic.DeepEqual(p.Status.NodeGroups, groups) {
		return nil
	}
	configuration, err := ssa.Configuration[applyv1alpha1.GPUSharingPolicyStatusApplyConfiguration](own)
	if err != nil {
		return err
	}
	owner := ssa.Owner{Client: c.client, Name: autoscaling.FieldManager}
	wrote, err := ssa.ApplyStatus(ctx, owner, p, applyv1alpha1.GPUSharingPolicy(p.Name).WithStatus(configuration), applyv1alpha1.ExtractGPUSharingPolicyStatus)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reporting on policy %s: %w", p.Name, err)
	}
	if wrote && requested && was.Reason != is.Reason {
		kind := corev1.EventTypeNormal
		if is.Status == metav1.ConditionFalse && is.Reason != v1alpha1.ReasonAdviceOnly {
			kind = corev1.EventTypeWarning
		}
		c.events.Eventf(p, nil, kind, is.Reason, "Autoscaling", "%s", format.Message(is.Message))
	}
	return nil
}

// longestUnread is how much is reported of why objects cannot be read, in characters.
const longestUnread = 1024
