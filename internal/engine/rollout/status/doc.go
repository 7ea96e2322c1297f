// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package status words what is reported: the conditions of a policy, the counts and messages of its nodes.
//
//	groups → Of → GPUSharingPolicy.status
//	member → Report → node state for CLI, metrics and Events
package status
