// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gate is what the gates of a change have in common: the judgement that each makes, and what a gate does that is not passed in
// time.
//
//	gate → Judgement{state, reason, message, next: Act | Step | nothing} → next gate | LetGo | Fail → last good state, or TimeOut
package gate
