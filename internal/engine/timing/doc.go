// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package timing holds the deadlines of a rollout and the stamps <key>@<seconds since 1970>, by which annotations
// record when something was done, and knows when the maintenance windows of a policy are open. It knows no clock.
//
//	rollout.windows → Calendar → At(now): open, and when that changes
package timing
