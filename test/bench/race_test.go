// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build race

package bench

// slowdown is what the bounds are stretched by where the race detector slows everything down.
const slowdown = 20
