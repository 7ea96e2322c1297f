// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import "math"

// Backend is what the kernel module charges the GPU memory of cgroups with. It picks one when it is loaded: dmem, a
// controller of Linux 6.14 and later, else misc, a table of its own, else none.
type Backend string

// The back ends.
const (
	NoBackend Backend = "none"
	Dmem      Backend = "dmem"
	Misc      Backend = "misc"
)

// NoLimit is the hard limit that is none (NVML_DEVICE_MEMORY_LIMIT_MAX).
const NoLimit = uint64(math.MaxUint64)

// MemoryLimit is what NVML says of a cgroup on a GPU, in bytes.
type MemoryLimit struct{ Soft, Hard, Used uint64 }

// MemoryKind is how a program takes memory.
type MemoryKind string

// The kinds. The first three are charged; imported is memory that another program has taken.
const (
	DeviceMemory   MemoryKind = "device memory"
	PoolMemory     MemoryKind = "memory of an asynchronous pool"
	VirtualMemory  MemoryKind = "memory of virtual addresses"
	ManagedMemory  MemoryKind = "managed memory"
	ImportedMemory MemoryKind = "imported memory"
)
