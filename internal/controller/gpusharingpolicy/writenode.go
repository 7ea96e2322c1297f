// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

func (w *writer) patchNode(ctx context.Context, a action.PatchNode) (bool, error) {
	metadata := map[string]any{}
	if len(a.Labels) > 0 {
		metadata["labels"] = a.Labels
	}
	if len(a.Annotations) > 0 {
		metadata["annotations"] = a.Annotations
	}
	if len(metadata) == 0 {
		return false, nil
	}
	node, found := w.node(a.Node)
	if !found {
		return false, nil
	}
	if a.Locked {
		metadata["resourceVersion"] = node.ResourceVersion
	}
	return w.writeNode(ctx, node, metadata, nil)
}

// taint writes the taints of a node as it was read. They are one list with several authors, so each such write is
// refused if anything about the node changed since.
func (w *writer) taint(ctx context.Context, a action.Taint) (bool, error) {
	node, found := w.node(a.Node)
	if !found || slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&a.Taint) }) {
		return false, nil
	}
	metadata := map[string]any{"resourceVersion": node.ResourceVersion}
	if a.Baseline != "" {
		metadata["annotations"] = map[string]string{v1alpha1.AnnotationBaseline: a.Baseline}
	}
	return w.writeNode(ctx, node, metadata, map[string]any{"taints": append(slices.Clone(node.Spec.Taints), a.Taint)})
}

func (w *writer) untaint(ctx context.Context, a action.Untaint) (bool, error) {
	node, found := w.node(a.Node)
	if !found {
		return false, nil
	}
	ours := func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }
	if !slices.ContainsFunc(node.Spec.Taints, ours) {
		return false, nil
	}
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), ours)
	return w.writeNode(ctx, node, map[string]any{"resourceVersion": node.ResourceVersion}, map[string]any{"taints": taints})
}

// keepTaints writes the taints that are there for a policy's sake, and in the same patch which of them are ours.
func (w *writer) keepTaints(ctx context.Context, a action.KeepTaints) (bool, error) {
	node, found := w.node(a.Node)
	if !found {
		return false, nil
	}
	record := node.Annotations[v1alpha1.AnnotationTaints]
	taints, ours := rollout.Retaint(node.Spec.Taints, record, a.Want)
	if ours == record && slices.Equal(taints, node.Spec.Taints) {
		return false, nil
	}
	metadata := map[string]any{"resourceVersion": node.ResourceVersion}
	switch {
	case ours != "":
		metadata["annotations"] = map[string]*string{v1alpha1.AnnotationTaints: &ours}
	case record != "":
		metadata["annotations"] = map[string]*string{v1alpha1.AnnotationTaints: nil}
	}
	return w.writeNode(ctx, node, metadata, map[string]any{"taints": taints})
}

// writeNode patches a node as it was read, and none that took its place under the same name. It keeps what the node is
// then, for a further write in this reconcile.
func (w *writer) writeNode(ctx context.Context, have *corev1.Node, metadata, spec map[string]any) (bool, error) {
	metadata["uid"] = have.UID
	body := map[string]any{"metadata": metadata}
	if spec != nil {
		body["spec"] = spec
	}
	patch, err := mergePatch(body)
	if err != nil {
		return false, err
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: have.Name}}
	err = w.client.Patch(ctx, node, patch, client.FieldOwner(fieldManager))
	w.note(nodeKind, have.Name, node.ResourceVersion, err)
	if apierrors.IsConflict(err) { // kubelets and others write it all the time
		w.meetsOthers()
		return false, nil
	}
	wrote, err := ignoreGone(err)
	if wrote {
		w.wrote(node)
	}
	return wrote, err
}
