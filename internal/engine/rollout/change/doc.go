// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package change is the state machine of one node: a chain of gates, in the order of a change. Each gate reports what the node waits
// for; a node for which no gate waits is up to date.
//
//	observe ─ blocked ─ drain ─ pause clients ─ apply ─ select config ─ verify ─ release
//	   │         │        │           │           │           │            │
//	   │         │        └───────────┴───────────┴───────────┴────────────┴→ failed → last good state, or baseline
//	   │         └ unsupported, or another controller offers the GPUs
//	   └ the agent does not report
//
// Each gate has a file of that name. Decisions follow from what is observed, so any reconcile may be the first.
package change
