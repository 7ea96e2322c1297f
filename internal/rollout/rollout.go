// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rollout decides: from everything that is so in the cluster, what to change next and what to say about it.
// It is pure; it knows neither a client nor a clock.
package rollout

// Decide is one safe pass towards what the policies ask. The same world gives the same decision, and the world that
// results from carrying it out gives the next one, so a pass may be cut short anywhere.
func Decide(w World) Decision { panic("not written yet") }
