// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package eviction names the pods and processes that block a change, and chooses the pods that are evicted.
//
//	view.Blockers → Blockers, Describe (for people) | Choose → Evict; not chosen: pods that would come back at once
package eviction
