// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package taints decides which taints the nodes of a policy have, and what NVIDIA's programs must tolerate for that.
//
//	policy → tolerations in the ClusterPolicy → NVIDIA's pods tolerate them → taints on the nodes
//	new node → startup taint → up to date → taken off
package taints
