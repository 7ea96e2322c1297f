// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package budget decides which nodes may change at the same time.
//
//	judgement with a step → held up by pause, window, halt? → slot free (maxUnavailable, one node first)? → actions | wait
//
// A node that has begun holds its slot until it is up to date, failed and rolled back, or past its deadline (slots.go). Nodes are taken
// in a fixed order, so that a decision over an older world picks the same nodes again.
package budget
