// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// nodeFeature is the kind by which GPU Feature Discovery (GFD) asks Node Feature Discovery (NFD) for labels.
var nodeFeature = kind{
	cluster.NodeFeatureKind(), "nodefeatures.nfd.k8s-sigs.io",
}

// +kubebuilder:rbac:groups=nfd.k8s-sigs.io,resources=nodefeatures,verbs=list;watch

// NodeFeatures reads all NodeFeatures from the cache, in the form of SlimNodeFeature. They are shared with the cache
// and must not be changed. The result served is the version in which the API server serves them; empty where the
// cluster has no such kind. Errors: ErrNotSynced.
func (c *Configurer) NodeFeatures(ctx context.Context) (all []unstructured.Unstructured, served schema.GroupVersionKind, err error) {
	return c.listServed(ctx, nodeFeature, client.UnsafeDisableDeepCopy)
}

// NewNodeFeature returns a NodeFeature without content, in a version that NodeFeatures returned.
func NewNodeFeature(served schema.GroupVersionKind) *unstructured.Unstructured { return object(served) }

// SlimNodeFeature keeps of a NodeFeature what decisions depend on: objects of nfd-worker list every feature of the
// node's kernel and CPU. Other objects it leaves alone.
func SlimNodeFeature(cached any) (any, error) {
	feature, isUnstructured := cached.(*unstructured.Unstructured)
	if !isUnstructured || feature.GroupVersionKind().GroupKind() != nodeFeature.GroupKind() {
		return cached, nil
	}
	slim := object(feature.GroupVersionKind())
	slim.SetNamespace(feature.GetNamespace())
	slim.SetName(feature.GetName())
	slim.SetUID(feature.GetUID())
	slim.SetResourceVersion(feature.GetResourceVersion())
	slim.SetCreationTimestamp(feature.GetCreationTimestamp())
	if owners := feature.GetOwnerReferences(); len(owners) > 0 {
		slim.SetOwnerReferences(owners)
	}
	slim.SetLabels(map[string]string{cluster.LabelNodeName: feature.GetLabels()[cluster.LabelNodeName]})
	if at, stamped := feature.GetAnnotations()[v1alpha1.AnnotationMPSCapable]; stamped {
		slim.SetAnnotations(map[string]string{v1alpha1.AnnotationMPSCapable: at})
	}
	if value := cluster.RequestedMPSCapable(feature); value != "" {
		if err := unstructured.SetNestedField(slim.Object, value, "spec", "labels", cluster.LabelMPSCapable); err != nil {
			return nil, fmt.Errorf("reading NodeFeature %s/%s: %w", feature.GetNamespace(), feature.GetName(), err)
		}
	}
	return slim, nil
}

// requestChanged reports whether an update of a NodeFeature changes what it asks for.
func requestChanged(old, updated *unstructured.Unstructured) bool {
	return cluster.RequestedMPSCapable(old) != cluster.RequestedMPSCapable(updated) || old.GetUID() != updated.GetUID() || old.GetLabels()[cluster.LabelNodeName] != updated.GetLabels()[cluster.LabelNodeName]
}
