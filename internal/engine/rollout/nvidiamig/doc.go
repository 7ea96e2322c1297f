// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvidiamig keeps NVIDIA's mig-manager off a node that the agent partitions, or drives it where a policy asks for that.
//
//	agent:       Fence → NVIDIA's mig-manager is gone → … → Released: its labels are restored, it comes back → Answered
//	mig-manager: Prepare → drained → Drive → Verify → … → Released: its label is restored → Answered
//
// Where a policy asks for it (sharing.mig.actuator: MIGManager), NVIDIA's mig-manager partitions the GPUs in place of our
// agent. It is driven by one label of the node, which names a configuration in a file that all nodes share, and answers
// with another. It drains nobody and knows no deadline, so all around it is done here:
//
//	prepared  it runs on the node and reads our file, with the configuration in it
//	drained   nobody uses a GPU that it clears, as for any disruptive change
//	aside     the spec names the configuration, and the agent has closed the driver
//	asked     the label names it, the state is removed in the same patch; a stamp on the node tells since when
//	success   the spec no longer names it, so the agent looks: what counts is what NVML says
//	failed    or no answer in time: the node goes back to its last good state, in the same way
//	released  the label names what it did before the operator; our file stays until mig-manager has answered
//
// Its own label says true all the while. It pauses NVIDIA's clients itself.
package nvidiamig
