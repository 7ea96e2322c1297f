// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package plugin looks after the pods of NVIDIA's device plugin on a node: which config they read, which MIG instances they have
// seen, why they do not run, and when they are started anew.
//
//	instances changed → Enumerating → deleted → seen
//	not advertised → RestartOnce
package plugin
