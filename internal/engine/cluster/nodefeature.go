// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// NodeFeatures is what the NodeFeature objects of a node say about the label nvidia.com/mps.capable, which keeps a pod
// of NVIDIA's MPS DaemonSet on the node.
type NodeFeatures struct {
	// OverriddenSince is when the operator applied its object, which sets the label to false. Zero: there is none.
	OverriddenSince time.Time
	// Others is the value in the objects of others: true if one of them says true, false if one names the label. Empty:
	// none names it.
	Others string
	// Author is the object that Others comes from, as namespace/name; the first by name.
	Author string
}

// NodeFeatureKind is the kind by which GPU Feature Discovery (GFD) asks Node Feature Discovery (NFD) for labels of a
// node.
func NodeFeatureKind() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeature"}
}

const (
	// LabelNodeName names, on a NodeFeature, the node that it is about.
	LabelNodeName = "nfd.node.kubernetes.io/node-name"
	// LabelMPSCapable keeps a pod of NVIDIA's MPS DaemonSet on a node.
	LabelMPSCapable = NvidiaDomain + "mps.capable"
)

// IsNFDWorkers reports whether a NodeFeature is the one that NFD's worker on a node writes in its own namespace: it has
// the name of the node (kubernetes-sigs/node-feature-discovery pkg/nfd-worker). The roles view, edit and admin of
// Kubernetes do not allow that, but where the Operator Lifecycle Manager installed NFD, it has added it to them.
func IsNFDWorkers(feature *unstructured.Unstructured) bool {
	return feature.GetName() != "" && feature.GetName() == feature.GetLabels()[LabelNodeName]
}

// With adds what a NodeFeature says. The namespace is the operator's; empty if it is not known.
func (f NodeFeatures) With(feature *unstructured.Unstructured, namespace string) NodeFeatures {
	named := feature.GetName() == action.OverrideName(feature.GetLabels()[LabelNodeName])
	if named && (namespace == "" || feature.GetNamespace() == namespace) {
		f.OverriddenSince = appliedAt(feature)
		return f
	}
	value := RequestedMPSCapable(feature)
	if value == "" {
		return f
	}
	if value != LabelTrue {
		value = LabelFalse
	}
	author := feature.GetNamespace() + "/" + feature.GetName()
	if value > f.Others || value == f.Others && author < f.Author {
		f.Others, f.Author = value, author
	}
	return f
}

// appliedAt is when the operator applied its NodeFeature: by the clock of its controller, which may be ahead of the API
// server's, unless the object has been restored since.
func appliedAt(feature *unstructured.Unstructured) time.Time {
	created := feature.GetCreationTimestamp().Time
	if at, stamped := timing.Stamped(feature.GetAnnotations()[v1alpha1.AnnotationMPSCapable], LabelFalse); stamped && at.After(created) {
		return at
	}
	return created
}

// RequestedMPSCapable is the value that a NodeFeature asks for as the label nvidia.com/mps.capable; empty if it does
// not name it.
func RequestedMPSCapable(feature *unstructured.Unstructured) string {
	value, _, err := unstructured.NestedString(feature.Object, "spec", "labels", LabelMPSCapable)
	if err != nil {
		return "" // the value of a label has no other type
	}
	return value
}

const (
	// LabelNodePool names, on a node that Karpenter made, its NodePool. Source: sigs.k8s.io/karpenter,
	// pkg/apis/v1/labels.go.
	LabelNodePool = "karpenter.sh/nodepool"
	// LabelInitialized is on a node that Karpenter made once everything that its pods asked for is there.
	LabelInitialized = "karpenter.sh/initialized"
	// taintUnregistered is on a node that Karpenter made until Karpenter has given it its labels and startup taints.
	// Source: pkg/apis/v1/taints.go.
	taintUnregistered = "karpenter.sh/unregistered"
)

// NodePool is what of a NodePool of Karpenter matters here.
type NodePool struct {
	// StartupTaints are the keys of spec.template.spec.startupTaints. Karpenter puts these taints on each new node, and
	// waits until they are gone.
	StartupTaints []string
}

// IsKarpenters reports whether Karpenter made the node.
func IsKarpenters(n *Node) bool {
	return n.Labels[LabelNodePool] != "" || slices.ContainsFunc(n.Taints, func(t corev1.Taint) bool { return t.Key == taintUnregistered })
}

// IsUninitialized reports whether Karpenter made the node, and takes any taint that it does not know there for a sign that it has no room.
func IsUninitialized(n *Node) bool { return IsKarpenters(n) && n.Labels[LabelInitialized] != LabelTrue }
