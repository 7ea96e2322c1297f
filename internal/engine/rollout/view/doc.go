// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package view is what is known about one node: its target, the steps to it, and who blocks them. It decides nothing.
//
//	World + policy → Target (desired state, last good state or baseline) → steps → blockers
//
// The files are by subject: NVIDIA's clients, MPS, maintenance and reboots. A view does not depend on the time.
package view
