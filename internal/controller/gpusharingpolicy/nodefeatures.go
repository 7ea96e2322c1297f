// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// +kubebuilder:rbac:namespace=gpu-sharing-operator,groups=nfd.k8s-sigs.io,resources=nodefeatures,verbs=create;patch;delete

// features are what the NodeFeatures tell, and the version that is served.
type features struct {
	cluster.Features

	served schema.GroupVersionKind // empty: the kind is not served
}

// gatherFeatures reads the NodeFeatures. One of ours that was deleted is gone, also while the cache still shows it: a
// node whose override is gone must not be taken for one that has it.
func (c *Controller) gatherFeatures(ctx context.Context, s *seen) error {
	all, served, err := c.PluginConfig.NodeFeatures(ctx)
	if err != nil {
		return err
	}
	s.snapshot.Plugin.NodeFeatures = !served.Empty()
	s.features = features{cluster.NewFeatures(), served}
	s.features.AddAll(all, c.Namespace)
	for node, uid := range c.deleted {
		if s.features.Ours[node] != uid {
			delete(c.deleted, node)
			continue
		}
		f := s.features.Of[node]
		f.OverriddenSince = time.Time{}
		s.features.Of[node] = f
	}
	return nil
}

// keepMPSOff applies the operator's NodeFeature for a node. It has no owner: garbage collection would let NVIDIA's MPS
// DaemonSet back beside the operator's daemons when the GPUNodes go with their kind. Node Feature Discovery deletes it
// with the node.
func (w *writer) keepMPSOff(ctx context.Context, a action.KeepMPSOff) (bool, error) {
	if _, found := w.gpuNodes[a.Node]; !found {
		return false, nil
	}
	want := pluginconfig.NewNodeFeature(w.features.served)
	want.SetNamespace(w.Namespace)
	want.SetName(action.OverrideName(a.Node))
	want.SetLabels(map[string]string{cluster.LabelNodeName: a.Node, "app.kubernetes.io/managed-by": "gpu-sharing-operator"})
	want.SetAnnotations(map[string]string{v1alpha1.AnnotationMPSCapable: timing.Stamp(cluster.LabelFalse, w.snapshot.Now)})
	want.Object["spec"] = map[string]any{
		"labels":   map[string]any{cluster.LabelMPSCapable: "false", v1alpha1.LabelOverridden: "true"},
		"features": map[string]any{"flags": map[string]any{}, "attributes": map[string]any{}, "instances": map[string]any{}},
	}
	return w.applyServed(ctx, want)
}

// disown removes the owner of the operator's NodeFeatures that earlier versions set.
func (w *writer) disown(ctx context.Context) error {
	var errs []error
	for _, node := range w.features.Owned {
		metadata := map[string]any{"uid": w.features.Ours[node], "ownerReferences": nil}
		patch, err := mergePatch(map[string]any{"metadata": metadata})
		if err != nil {
			return err
		}
		feature := pluginconfig.NewNodeFeature(w.features.served)
		feature.SetNamespace(w.Namespace)
		feature.SetName(action.OverrideName(node))
		_, err = ignoreReplaced(w.client.Patch(ctx, feature, patch, client.FieldOwner(fieldManager)))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// allowMPS deletes the operator's NodeFeature for a node.
func (w *writer) allowMPS(ctx context.Context, a action.AllowMPS) (bool, error) {
	uid, found := w.features.Ours[a.Node]
	if !found {
		return false, nil
	}
	feature := pluginconfig.NewNodeFeature(w.features.served)
	feature.SetNamespace(w.Namespace)
	feature.SetName(action.OverrideName(a.Node))
	wrote, err := w.deleteServed(ctx, feature, uid)
	if wrote {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.deleted[a.Node] = uid
	}
	return wrote, err
}
