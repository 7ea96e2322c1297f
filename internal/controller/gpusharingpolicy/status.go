// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// report applies the status of each policy, also when actions failed, and announces what is new about it.
func (r *reconciliation) report(ctx context.Context, d rollout.Decision) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(d.Policies)) {
		if policy, found := r.policies[name]; found {
			errs = append(errs, r.reportPolicy(ctx, policy, d.Policies[name], d.Nodes))
		}
	}
	return errors.Join(errs...)
}

// reportPolicy applies the status of a policy. The nodes are the states of all nodes.
func (r *reconciliation) reportPolicy(
	ctx context.Context, policy *v1alpha1.GPUSharingPolicy, status v1alpha1.GPUSharingPolicyStatus, nodes []rollout.NodeState,
) error {
	if equality.Semantic.DeepEqual(ownStatus(policy), status) {
		return nil // what an apply compares costs much more, for each policy in each reconcile
	}
	configuration, err := ssa.Configuration[applyv1alpha1.GPUSharingPolicyStatusApplyConfiguration](status)
	if err != nil {
		return err
	}
	want := applyv1alpha1.GPUSharingPolicy(policy.Name).WithStatus(configuration)
	owner := ssa.Owner{Client: r.client, Name: fieldManager}
	wrote, err := ssa.ApplyStatus(ctx, owner, policy, want, applyv1alpha1.ExtractGPUSharingPolicyStatus)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reporting on policy %s: %w", policy.Name, err)
	}
	if wrote {
		r.recorder.announceReasons(policy, status.Conditions)
		r.recorder.announceNodes(policy, status.Pending, nodes)
	}
	return nil
}

// ownStatus is the status of a policy without what other controllers report.
func ownStatus(policy *v1alpha1.GPUSharingPolicy) v1alpha1.GPUSharingPolicyStatus {
	own := policy.Status
	own.NodeGroups, own.OnDemand = nil, nil
	for _, another := range v1alpha1.ConditionsOfOthers() {
		if _, reported := condition.Find(own.Conditions, another); reported {
			own.Conditions = condition.Remove(own.Conditions, another)
		}
	}
	return own
}
