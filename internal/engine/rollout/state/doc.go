// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package state names how far a node is on its way, and how a node in a state counts in the status of its policy:
//
//	Unknown, Unsupported                                                     nothing is done
//	PendingNonDisruptive ─────────────────────────────────┐
//	PendingDisruptive → Draining → PausingClients → Idle ─┴→ Applying → Selecting → Verifying → Releasing → UpToDate
//	                        │                                   └────→ Failed ←─────────┘
//	                        └ not idle in time: Failed                   └ back to the last good state, or the baseline
//
// A state is derived in each reconcile and never stored. A node that was UpToDate and advertises something else is Degraded: it is
// reported, and keeps no other node waiting.
package state
