// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvidiamig keeps NVIDIA's mig-manager off a node that the agent partitions, or drives it where a policy asks for that.
//
//	agent:       Fence → NVIDIA's mig-manager is gone → … → released: its label is restored
//	mig-manager: Prepare → drained → Drive → Verify
package nvidiamig
