// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package clients pauses and resumes NVIDIA's GPU clients on a node by their deploy labels.
//
//	Pause → they end → the GPUs are changed → Resume, with the MIG instances that the device plugin will see
package clients
