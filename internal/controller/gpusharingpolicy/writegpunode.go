// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// setSpec applies the spec of a GPUNode. Its UID keeps the apply from creating a GPUNode that was removed with its
// node.
func (w *writer) setSpec(ctx context.Context, a action.SetSpec) (bool, error) {
	have, found := w.gpuNodes[a.Node]
	if !found {
		return false, nil
	}
	want := applyv1alpha1.GPUNode(a.Node).WithUID(have.UID)
	if !equality.Semantic.DeepEqual(a.Spec, v1alpha1.GPUNodeSpec{}) {
		spec, err := ssa.Configuration[applyv1alpha1.GPUNodeSpecApplyConfiguration](a.Spec)
		if err != nil {
			return false, err
		}
		want.WithSpec(spec)
	}
	wrote, err := ssa.Apply(ctx, ssa.Owner{Client: w.client, Name: fieldManager}, have, want, extractWithUID)
	if wrote || err != nil {
		w.note(gpuNodeKind, a.Node, versionOf(want), err)
	}
	if apierrors.IsConflict(err) {
		return false, nil // it is gone, or another took its place
	}
	return wrote, err
}

// reportNode applies the controller's part of the status of a GPUNode. Its UID keeps it from another GPUNode of that
// name.
func (w *writer) reportNode(ctx context.Context, a action.Report) (bool, error) {
	have, found := w.gpuNodes[a.Node]
	if !found {
		return false, nil
	}
	status, err := ssa.Configuration[applyv1alpha1.GPUNodeStatusApplyConfiguration](a.Status)
	if err != nil {
		return false, err
	}
	want := applyv1alpha1.GPUNode(a.Node).WithUID(have.UID).WithStatus(status)
	wrote, err := ssa.ApplyStatus(ctx, ssa.Owner{Client: w.client, Name: fieldManager}, have, want, extractStatusWithUID)
	if wrote || err != nil {
		w.note(gpuNodeKind, a.Node, versionOf(want), err)
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil // it is gone, or another took its place
	}
	return wrote, err
}

// versionOf is the resource version in the answer to an apply.
func versionOf(applied *applyv1alpha1.GPUNodeApplyConfiguration) string {
	if applied.ResourceVersion == nil {
		return ""
	}
	return *applied.ResourceVersion
}

func extractWithUID(have *v1alpha1.GPUNode, manager string) (*applyv1alpha1.GPUNodeApplyConfiguration, error) {
	was, err := applyv1alpha1.ExtractGPUNode(have, manager)
	if err != nil {
		return nil, err
	}
	return was.WithUID(have.UID), nil
}

func extractStatusWithUID(have *v1alpha1.GPUNode, manager string) (*applyv1alpha1.GPUNodeApplyConfiguration, error) {
	was, err := applyv1alpha1.ExtractGPUNodeStatus(have, manager)
	if err != nil {
		return nil, err
	}
	return was.WithUID(have.UID), nil
}
