// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cluster is everything that a decision depends on, as the controller read it, in plain values:
//
//	Node, GPUNode, Pod, NodeFeature, NodePool → NodeOf, PodOf, With → Node, Pod → Snapshot
//
// What the operator recorded on a Node is read here too: the copy of the baseline, and the signs of other controllers.
package cluster
