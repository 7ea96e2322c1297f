// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvidiadra is what a change needs of NVIDIA's DRA driver on a node that the driver alone serves: what it lacks for a policy, the
// restart by which it looks at the GPUs again, and the proof that it publishes them.
//
//	Lacks → … GPUs changed → Publishing: not as the agent reports → pod deleted, once → published | late → failed
//	Duplicated, Hanging, Failing: what is left half-done
package nvidiadra
