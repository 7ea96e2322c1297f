// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// NFD says how Node Feature Discovery (NFD) is installed.
type NFD struct {
	// Namespace of NFD, whose objects come first. Empty: node-feature-discovery, apart from the GPU Operator.
	Namespace string
	// Ignores are the namespaces whose objects nfd-master does not read (restrictions.nodeFeatureNamespaceSelector).
	Ignores []string
}

const (
	// annotationMerged lists, on a Node, the labels that nfd-master set.
	annotationMerged = "nfd.node.kubernetes.io/feature-labels"
	labelNodeName    = "nfd.node.kubernetes.io/node-name"
	// mergePeriod is how often nfd-master acts.
	mergePeriod = time.Second
)

func nodeFeatureKind() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeature"}
}

// discovery is GPU Feature Discovery and Node Feature Discovery, which label the node.
type discovery struct {
	*machine

	merged   time.Time    // when nfd-master last looked at the NodeFeatures
	labelled nvidia.Event // for which the GPU Operator has set its labels
}

// discoverFeatures is GPU Feature Discovery (GFD): it asks for labels by an object in its own namespace
// (k8s-device-plugin internal/lm/output.go). Without its pod, the object stays as it is.
func (d *discovery) discoverFeatures(ctx context.Context) error {
	namespace := d.featureDiscovery()
	if namespace == "" {
		return nil
	}
	inventory, err := d.Inventory(ctx)
	var found map[string]*string
	if err == nil {
		found, err = d.featureLabels(inventory.Devices)
	}
	if err != nil {
		return nil //nolint:nilerr // GPU Feature Discovery leaves its labels, and the kubelet and the DaemonSets work on
	}
	labels := map[string]any{}
	for key, value := range found {
		if value != nil {
			labels[key] = *value
		}
	}
	feature := &unstructured.Unstructured{}
	feature.SetGroupVersionKind(nodeFeatureKind())
	key := client.ObjectKey{Namespace: namespace, Name: "nvidia-features-for-" + d.Name}
	err = d.Client.Get(ctx, key, feature)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("reading NodeFeature %s: %w", key, err)
	}
	exists := err == nil
	spec := map[string]any{
		"labels":   labels,
		"features": map[string]any{"flags": map[string]any{}, "attributes": map[string]any{}, "instances": map[string]any{}},
	}
	if exists && equality.Semantic.DeepEqual(feature.Object["spec"], spec) {
		return nil
	}
	feature.SetNamespace(key.Namespace)
	feature.SetName(key.Name)
	feature.SetLabels(map[string]string{labelNodeName: d.Name})
	feature.Object["spec"] = spec
	if exists {
		err = d.Client.Update(ctx, feature)
	} else {
		err = d.Client.Create(ctx, feature)
	}
	if err != nil {
		return fmt.Errorf("writing NodeFeature %s: %w", key, err)
	}
	return nil
}

// mergeFeatures is nfd-master, as far as this node is concerned.
func (d *discovery) mergeFeatures(ctx context.Context, node *corev1.Node) error {
	now := d.Clock.Now()
	if now.Sub(d.merged) < mergePeriod {
		return nil
	}
	d.merged = now
	all := &unstructured.UnstructuredList{}
	all.SetGroupVersionKind(nodeFeatureKind().GroupVersion().WithKind("NodeFeatureList"))
	err := d.Client.List(ctx, all, client.MatchingLabels{labelNodeName: d.Name})
	if meta.IsNoMatchError(err) {
		return nil // NFD, which brings the kind, is not installed
	}
	if err != nil {
		return fmt.Errorf("listing the NodeFeatures of node %s: %w", d.Name, err)
	}
	var found []nvidia.NodeFeature
	for _, o := range all.Items {
		labels, _, err := unstructured.NestedStringMap(o.Object, "spec", "labels")
		if err != nil {
			return fmt.Errorf("reading NodeFeature %s: %w", o.GetName(), err)
		}
		if !slices.Contains(d.NFD.Ignores, o.GetNamespace()) {
			found = append(found, nvidia.NodeFeature{Namespace: o.GetNamespace(), Name: o.GetName(), Labels: labels})
		}
	}
	before := map[string]bool{}
	for name := range strings.SplitSeq(node.Annotations[annotationMerged], ",") {
		before[name] = true
	}
	want := nvidia.MergeFeatures(found, cmp.Or(d.NFD.Namespace, "node-feature-discovery"))
	labels := nvidia.FeatureLabels(node.Labels, before, want)
	merged := strings.Join(slices.Sorted(maps.Keys(want)), ",")
	if len(labels) == 0 && node.Annotations[annotationMerged] == merged {
		return nil
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"labels": labels, "annotations": map[string]string{annotationMerged: merged},
	}})
	if err != nil {
		return err
	}
	if err := d.Client.Patch(ctx, node, client.RawPatch("application/merge-patch+json", body)); err != nil {
		return fmt.Errorf("labelling node %s: %w", d.Name, err)
	}
	return nil
}

// featureDiscovery is the namespace of the pod of GFD on the node; empty if there is none.
func (d *discovery) featureDiscovery() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, state := range d.pods {
		if state.pod.Labels["app"] == appFeatureDiscovery {
			return state.pod.Namespace
		}
	}
	return ""
}
