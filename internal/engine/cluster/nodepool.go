// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

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
