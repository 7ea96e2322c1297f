// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package format holds what the text of messages has in common: lists of names, cut texts and times of day.
package format
