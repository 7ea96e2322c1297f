// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package baseline records the state in which a node and each of its GPUs were found, in GPUNode.spec and in a copy on the Node.
//
//	first change of a GPU → Record, SaveBaseline → … → released: Forget, DropCopy
package baseline
