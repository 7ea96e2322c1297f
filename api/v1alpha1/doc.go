// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is the API of the GPU Sharing Operator, group gpusharing.io.
//
// A GPUSharingPolicy says how the GPUs of the nodes it selects are shared; people write it. A GPUNode is what the
// operator knows of one node: its spec is the desired state of each GPU of that node (written by the controller alone), its
// status what the node's agent observed (written by the agent alone).
//
// Field names are NVIDIA's own where NVIDIA has one (replicas, renameByDefault, failRequestsGreaterThanOne, mixed,
// single), so that nothing has to be learned anew.
//
// +kubebuilder:object:generate=true
// +kubebuilder:ac:generate=true
// +groupName=gpusharing.io
package v1alpha1
