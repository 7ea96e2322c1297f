// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package group is the nodes that share the budget of one policy, each with its view and its judgement. It is data that budget,
// taints, workloads and status read.
package group
