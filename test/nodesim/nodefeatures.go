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

// NFD says how Node Feature Discovery (NFD) is installed. Its nfd-master makes the labels of a node from NodeFeature
// objects (NFD v0.19.0 pkg/nfd-master/nfd-master.go).
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

// mergeFeatures is nfd-master, as far as this node is concerned: it makes one set of labels of all objects that are
// about the node, a later object overwrites an earlier one, and labels that no object names any more go.
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
	want, err := d.NFD.merge(all.Items)
	if err != nil {
		return err
	}
	labels := map[string]*string{}
	for key := range strings.SplitSeq(node.Annotations[annotationMerged], ",") {
		if _, wanted := want[key]; !wanted && key != "" {
			labels[key] = nil
		}
	}
	for key, value := range want {
		if have, labelled := node.Labels[key]; !labelled || have != value {
			labels[key] = &value
		}
	}
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

// merge makes one set of labels of objects: those of NFD's own namespace first, then by name, then by namespace.
func (f NFD) merge(features []unstructured.Unstructured) (map[string]string, error) {
	own := cmp.Or(f.Namespace, "node-feature-discovery")
	foreign := func(o *unstructured.Unstructured) int {
		if o.GetNamespace() == own {
			return 0
		}
		return 1
	}
	slices.SortFunc(features, func(a, b unstructured.Unstructured) int {
		return cmp.Or(cmp.Compare(foreign(&a), foreign(&b)), cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetNamespace(), b.GetNamespace()))
	})
	want := map[string]string{}
	for i := range features {
		if slices.Contains(f.Ignores, features[i].GetNamespace()) {
			continue
		}
		labels, _, err := unstructured.NestedStringMap(features[i].Object, "spec", "labels")
		if err != nil {
			return nil, fmt.Errorf("reading NodeFeature %s: %w", features[i].GetName(), err)
		}
		maps.Copy(want, labels)
	}
	return want, nil
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
