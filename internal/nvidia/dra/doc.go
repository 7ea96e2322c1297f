// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package dra shares GPUs where NVIDIA's DRA driver serves them (kubernetes-sigs/dra-driver-nvidia-gpu), beside package
// deviceplugin. It is pure: it knows which of both serves a node, what a policy means there or why it cannot be
// honoured, which DeviceClasses and DeviceTaintRules belong to it, and what the ResourceSlices of the node must show.
//
//	facts of a node → StackOf
//	policy + GPUs → Render → name, resources, shares | plan.Problem
//	ResourceSlices → PoolOf → Pool.Differs from the GPUs that the agent reports
//
// The driver enumerates the GPUs once, when it starts. So what it publishes is compared by UUID, never by number alone:
// an instance that was made anew has the former name and another UUID.
package dra
