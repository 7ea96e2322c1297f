// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

// Stack is which of NVIDIA's programs offers the GPUs of a node to pods.
type Stack string

// The stacks.
const (
	// DevicePlugin is NVIDIA's device plugin, or nothing as yet.
	DevicePlugin Stack = "DevicePlugin"
	// DRADriver is NVIDIA's DRA driver, alone.
	DRADriver Stack = "DRA"
	// Both means that each of them offers the GPUs, and gives them to pods of which the other knows nothing. The
	// operator changes nothing on such a node.
	Both Stack = "Both"
)

// Facts are what tells the stack of a node.
type Facts struct {
	// Driver says that NVIDIA's DRA driver shows on the node: by its pod, its DaemonSet or its ResourceSlices.
	Driver bool
	// Plugin says that a pod of NVIDIA's device plugin is on the node, or is to come.
	Plugin bool
	// Allocatable says that the node advertises at least one GPU or instance. A resource whose plugin is gone stays
	// listed with 0, which the scheduler takes for none.
	Allocatable bool
}

// StackOf returns the stack of a node.
func StackOf(f Facts) Stack {
	switch {
	case !f.Driver:
		return DevicePlugin
	case f.Plugin || f.Allocatable:
		return Both
	}
	return DRADriver
}
