// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// doDRA writes objects of resource.k8s.io.
func (w *writer) doDRA(ctx context.Context, next action.Action) (bool, error) {
	switch a := next.(type) {
	case action.TaintDevices:
		return w.taintDevices(ctx, a)
	case action.UntaintDevices:
		return w.untaintDevices(ctx, a)
	case action.WriteClass:
		return w.writeClass(ctx, a)
	case action.DeleteClass:
		return w.deleteClass(ctx, a)
	default:
		return false, fmt.Errorf("no way to carry out %T", next)
	}
}

// taintDevices applies the operator's DeviceTaintRule for a node. The next reconcile waits until the cache shows it: a
// node that has one counts in the budget.
func (w *writer) taintDevices(ctx context.Context, a action.TaintDevices) (bool, error) {
	if w.dra.nodes[a.Node].taintRuleTaken {
		return false, fmt.Errorf("DeviceTaintRule %s exists and is not the operator's; delete it", dra.TaintRuleName(a.Node))
	}
	kind := w.rules.served.Load()
	if kind == nil {
		return false, nil
	}
	rule := dra.NewTaintRule(a.Node, a.Since)
	rule.SetGroupVersionKind(*kind)
	wrote, err := w.applyDRA(ctx, rule)
	w.changes.node(a.Node, true)
	w.barrier.wrote(*kind, rule.GetName(), rule.GetResourceVersion(), err, w.snapshot.Now)
	return wrote, err
}

// untaintDevices deletes it.
func (w *writer) untaintDevices(ctx context.Context, a action.UntaintDevices) (bool, error) {
	kind, uid := w.rules.served.Load(), w.dra.rules[a.Node]
	if kind == nil || uid == "" {
		return false, nil
	}
	rule := &unstructured.Unstructured{}
	rule.SetGroupVersionKind(*kind)
	rule.SetName(dra.TaintRuleName(a.Node))
	wrote, err := w.deleteDRA(ctx, rule, uid)
	if err == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.deletedTaintRules[uid] = true
	}
	return wrote, err
}

// writeClass applies a DeviceClass of the operator's.
func (w *writer) writeClass(ctx context.Context, a action.WriteClass) (bool, error) {
	kind := w.classes.served.Load()
	if kind == nil {
		return false, nil
	}
	class := dra.NewClass(a.Class)
	class.SetGroupVersionKind(*kind)
	return w.applyDRA(ctx, class)
}

// deleteClass deletes it.
func (w *writer) deleteClass(ctx context.Context, a action.DeleteClass) (bool, error) {
	kind, uid := w.classes.served.Load(), w.dra.classes[a.Name]
	if kind == nil || uid == "" {
		return false, nil
	}
	class := &unstructured.Unstructured{}
	class.SetGroupVersionKind(*kind)
	class.SetName(a.Name)
	return w.deleteDRA(ctx, class, uid)
}

func (w *writer) applyDRA(ctx context.Context, want *unstructured.Unstructured) (bool, error) {
	err := w.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(fieldManager), client.ForceOwnership)
	if meta.IsNoMatchError(err) {
		return false, nil // the kind has gone since, and the next reconcile sees that
	}
	return ignoreGone(err)
}

func (w *writer) deleteDRA(ctx context.Context, object *unstructured.Unstructured, uid types.UID) (bool, error) {
	wrote, err := ignoreReplaced(w.client.Delete(ctx, object, client.Preconditions{UID: &uid}))
	if meta.IsNoMatchError(err) {
		return false, nil
	}
	return wrote, err
}
