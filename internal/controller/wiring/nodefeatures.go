// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package wiring

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// nodeFeature is the kind by which GPU Feature Discovery (GFD) asks Node Feature Discovery (NFD) for labels.
var nodeFeature = kind{
	rollout.NodeFeatureKind(), "nodefeatures.nfd.k8s-sigs.io",
}

// +kubebuilder:rbac:groups=nfd.k8s-sigs.io,resources=nodefeatures,verbs=list;watch

// NodeFeatures reads all NodeFeatures from the cache, in the form of SlimNodeFeature. They are shared with the cache and must
// not be changed. The result served is false where the cluster has no such kind. Errors: ErrNotSynced, which passes within
// seconds.
func (w *Wiring) NodeFeatures(ctx context.Context) (all []unstructured.Unstructured, served bool, err error) {
	list := &unstructured.UnstructuredList{}
	served, err = w.listInto(ctx, nodeFeature, list, client.UnsafeDisableDeepCopy)
	return list.Items, served, err
}

// NewNodeFeature returns a NodeFeature without content.
func NewNodeFeature() *unstructured.Unstructured { return object(nodeFeature) }

// SlimNodeFeature keeps of a NodeFeature what decisions depend on: objects of nfd-worker list every feature of the node's
// kernel and CPU. Other objects it leaves alone.
func SlimNodeFeature(cached any) (any, error) {
	feature, isUnstructured := cached.(*unstructured.Unstructured)
	if !isUnstructured || feature.GroupVersionKind() != nodeFeature.GroupVersionKind {
		return cached, nil
	}
	slim := object(nodeFeature)
	slim.SetNamespace(feature.GetNamespace())
	slim.SetName(feature.GetName())
	slim.SetUID(feature.GetUID())
	slim.SetResourceVersion(feature.GetResourceVersion())
	slim.SetCreationTimestamp(feature.GetCreationTimestamp())
	slim.SetLabels(map[string]string{rollout.LabelNodeName: feature.GetLabels()[rollout.LabelNodeName]})
	if value := rollout.AsksMPSCapable(feature); value != "" {
		if err := unstructured.SetNestedField(slim.Object, value, "spec", "labels", rollout.LabelMPSCapable); err != nil {
			return nil, fmt.Errorf("reading NodeFeature %s/%s: %w", feature.GetNamespace(), feature.GetName(), err)
		}
	}
	return slim, nil
}

// asksAnew reports whether an update of a NodeFeature changes what it asks for.
func asksAnew(old, updated *unstructured.Unstructured) bool {
	return rollout.AsksMPSCapable(old) != rollout.AsksMPSCapable(updated) || old.GetUID() != updated.GetUID() || old.GetLabels()[rollout.LabelNodeName] != updated.GetLabels()[rollout.LabelNodeName]
}

// listInto reads all objects of a kind that may not be served in this cluster.
func (w *Wiring) listInto(ctx context.Context, k kind, all *unstructured.UnstructuredList, opts ...client.ListOption) (served bool, err error) {
	if err := w.client.Get(ctx, client.ObjectKey{Name: k.crd}, Definitions()); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	all.SetGroupVersionKind(k.list())
	err = w.client.List(ctx, all, opts...)
	if meta.IsNoMatchError(err) || isNotCached(err) {
		err = ErrNotSynced
	}
	if err != nil {
		return false, fmt.Errorf("reading %s: %w", k.crd, err)
	}
	return true, nil
}
