// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	featureGroup = "nfd.k8s-sigs.io"
	// copiedKey remembers on a node which labels were copied from its features, as Node Feature Discovery does.
	copiedKey = "nfd.node.kubernetes.io/feature-labels"
	// LabelPCI is what Node Feature Discovery says of a node with a GPU; the GPU Operator goes by it.
	LabelPCI = "feature.node.kubernetes.io/pci-10de.present"
)

// deployLabels are set on a node with GPUs so that the daemon sets run there. One that has another value stays.
func deployLabels(node *corev1.Node) map[string]string {
	want := map[string]string{"nvidia.com/gpu.present": "true"}
	for _, operand := range []string{"driver", "gpu-feature-discovery", "container-toolkit", "device-plugin", "dcgm", "dcgm-exporter", "node-status-exporter", "operator-validator", "client"} {
		want["nvidia.com/gpu.deploy."+operand] = "true"
	}
	if node.Labels["nvidia.com/mig.capable"] == "true" {
		want["nvidia.com/gpu.deploy.mig-manager"] = "true"
	}
	return want
}

// labelNodes lets NVIDIA's programs run on the nodes that have GPUs.
func (o *Operator) labelNodes(ctx context.Context) error {
	nodes := &corev1.NodeList{}
	if err := o.client.List(ctx, nodes, client.MatchingLabels{LabelPCI: "true"}); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	var errs []error
	for i := range nodes.Items {
		node := &nodes.Items[i]
		before := node.DeepCopy()
		for key, value := range deployLabels(node) {
			if node.Labels[key] == "" {
				node.Labels[key] = value
			}
		}
		if !maps.Equal(node.Labels, before.Labels) {
			errs = append(errs, o.client.Patch(ctx, node, client.MergeFrom(before)))
		}
	}
	return errors.Join(errs...)
}

// copyFeatures copies to each node the labels that GPU Feature Discovery asks for in a NodeFeature, and takes away those
// that it no longer asks for.
func (o *Operator) copyFeatures(ctx context.Context) error {
	features := &unstructured.UnstructuredList{}
	features.SetGroupVersionKind(schema.GroupVersionKind{Group: featureGroup, Version: "v1alpha1", Kind: "NodeFeatureList"})
	if err := o.client.List(ctx, features, client.InNamespace(Namespace)); err != nil {
		return fmt.Errorf("listing node features: %w", err)
	}
	var errs []error
	for i := range features.Items {
		errs = append(errs, o.copyFeature(ctx, &features.Items[i]))
	}
	return errors.Join(errs...)
}

func (o *Operator) copyFeature(ctx context.Context, feature *unstructured.Unstructured) error {
	want, _, err := unstructured.NestedStringMap(feature.Object, "spec", "labels")
	if err != nil {
		return fmt.Errorf("reading the node features %s: %w", feature.GetName(), err)
	}
	node := &corev1.Node{}
	name := feature.GetLabels()["nfd.node.kubernetes.io/node-name"]
	if err := o.client.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	before := node.DeepCopy()
	for key := range strings.SplitSeq(node.Annotations[copiedKey], ",") {
		if _, ok := want[key]; !ok {
			delete(node.Labels, key)
		}
	}
	maps.Copy(node.Labels, want)
	if node.Annotations == nil {
		node.Annotations = map[string]string{}
	}
	node.Annotations[copiedKey] = strings.Join(slices.Sorted(maps.Keys(want)), ",")
	if maps.Equal(node.Labels, before.Labels) && maps.Equal(node.Annotations, before.Annotations) {
		return nil
	}
	return o.client.Patch(ctx, node, client.MergeFrom(before))
}
