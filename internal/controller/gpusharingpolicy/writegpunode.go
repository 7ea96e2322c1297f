// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// setSpec applies the spec of a GPUNode. Its UID keeps the apply from creating a GPUNode that was removed with its
// node.
func (w *writer) setSpec(ctx context.Context, a action.SetSpec) (bool, error) {
	have, found := w.gpuNodes[a.Node]
	if !found {
		return false, nil
	}
	empty := equality.Semantic.DeepEqual(a.Spec, v1alpha1.GPUNodeSpec{})
	if equality.Semantic.DeepEqual(a.Spec, have.Spec) && (empty || ownsSpec(have)) {
		return false, nil
	}
	want := applyv1alpha1.GPUNode(a.Node).WithUID(have.UID)
	if !empty {
		spec, err := ssa.Configuration[applyv1alpha1.GPUNodeSpecApplyConfiguration](a.Spec)
		if err != nil {
			return false, err
		}
		want.WithSpec(spec)
	}
	err := w.client.Apply(ctx, want, client.FieldOwner(fieldManager), client.ForceOwnership)
	w.note(gpuNodeKind, a.Node, versionOf(want), err)
	if apierrors.IsConflict(err) {
		return false, nil // it is gone, or another took its place
	}
	return written("", err)
}

// reportNode applies the controller's part of the status of a GPUNode. Its UID keeps it from another GPUNode of that
// name.
func (w *writer) reportNode(ctx context.Context, a action.Report) (bool, error) {
	have, found := w.gpuNodes[a.Node]
	if !found {
		return false, nil
	}
	if equality.Semantic.DeepEqual(a.Status, rollout.ReportedStatus(have.Status)) {
		return false, nil
	}
	status, err := ssa.Configuration[applyv1alpha1.GPUNodeStatusApplyConfiguration](a.Status)
	if err != nil {
		return false, err
	}
	want := applyv1alpha1.GPUNode(a.Node).WithUID(have.UID).WithStatus(status)
	err = w.client.Status().Apply(ctx, want, client.FieldOwner(fieldManager), client.ForceOwnership)
	w.note(gpuNodeKind, a.Node, versionOf(want), err)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil // it is gone, or another took its place
	}
	return written("the status ", err)
}

// versionOf is the resource version in the answer to an apply.
func versionOf(applied *applyv1alpha1.GPUNodeApplyConfiguration) string {
	if applied.ResourceVersion == nil {
		return ""
	}
	return *applied.ResourceVersion
}

// written reports a write, or why an apply failed.
func written(what string, err error) (bool, error) {
	if err != nil {
		return false, fmt.Errorf("applying %sas %s: %w", what, fieldManager, err)
	}
	return true, nil
}

// ownsSpec reports whether the last write of the spec of a GPUNode was ours: what another one has written an apply of
// ours that leaves it out would not remove.
func ownsSpec(node *v1alpha1.GPUNode) bool {
	return slices.ContainsFunc(node.ManagedFields, func(e metav1.ManagedFieldsEntry) bool {
		return e.Manager == fieldManager && e.Operation == metav1.ManagedFieldsOperationApply && e.Subresource == "" && e.FieldsV1 != nil &&
			bytes.Contains(e.FieldsV1.GetRawBytes(), []byte(`"f:spec":`))
	})
}
