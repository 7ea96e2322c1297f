// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node decides what is done next about one node.
//
//	cluster.Snapshot + policy → Observe → View: target (desired state, last good state or baseline), steps to it, who blocks them
//	View → Decide → Result: state, reason, message, next step → AddFindings: what is left half-done
//
// decide.go is the table of contents of a change. A view does not depend on the time, so it can be kept while nothing
// changes.
package node
