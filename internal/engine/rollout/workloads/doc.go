// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package workloads finds the workloads of which no node meets the request once all policies are in force.
//
//	pods → demands (request, node selector) → offers of the nodes → unmet, a line each with what to change
package workloads
