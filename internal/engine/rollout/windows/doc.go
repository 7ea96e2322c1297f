// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package windows knows when the maintenance windows of a policy are open.
//
//	rollout.windows → Calendar → At(now): open, and when that changes
package windows
