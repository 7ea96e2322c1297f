// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvidiamps keeps NVIDIA's MPS DaemonSet off the nodes that the operator's MPS daemons serve, and lets it back afterwards.
//
//	Prepare, KeepOff → label nvidia.com/mps.capable=false → its pods are gone → … → NotNeeded → Allow
package nvidiamps
