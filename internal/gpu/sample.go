// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

// Sample is one measurement of how the GPUs of a node are used. A value that the driver does not give is nil, never 0.
type Sample struct {
	Devices []DeviceUse // by index
}

// DeviceUse is how one GPU is used.
type DeviceUse struct {
	UUID             string
	Index            int           // NVML's
	Minor            int           // of its device file; -1: unknown
	Memory           *Memory       // nil, for example, on a GPU that shares the memory of the host
	Utilization      *Utilization  // nil in MIG mode (NVML, nvmlDeviceGetUtilizationRates), in which the instances have it
	Instances        []InstanceUse // those with a compute instance, by id
	Processes        []ProcessUse  // by PID
	ProcessesUnknown bool          // the driver's lists of processes cannot be used, so that Processes is empty
}

// InstanceUse is how a MIG instance is used.
type InstanceUse struct {
	ID        int // of the GPU instance
	UUID      string
	ProfileID int // the driver's number of its profile; -1: unknown, and Start with it
	Start     int // the memory slice at which it begins
	Memory    *Memory
	// Utilization is that of the instance's own part of the GPU while it was measured: of its streaming multiprocessors
	// those that were busy, and of its memory bandwidth what was used. Nil before Hopper, and where the driver does not
	// report it (NVML, "GPM").
	Utilization *Utilization
}

// Memory is GPU memory in bytes. What the driver reserves for itself counts in none but Total.
type Memory struct {
	Total int64 `json:"total"`
	Used  int64 `json:"used"`
	Free  int64 `json:"free"`
}

// Utilization is the part of the driver's last sample period, 0 to 1, in which something was at work. InstanceUse has
// another definition.
type Utilization struct {
	Compute float64 `json:"compute"` // the streaming multiprocessors
	Memory  float64 `json:"memory"`  // the memory controller
}

// ProcessUse is how a process uses a GPU.
type ProcessUse struct {
	PID         int
	Instance    int  // GPU instance id or WholeGPU
	MPSClient   bool // it uses the GPU through MPS, whose server has the utilization of all its clients
	MemoryBytes *int64
	// Utilization is nil for a process that did no work in the last seconds too, since NVML lists only those that did,
	// as well as in MIG mode and for MPS clients.
	Utilization *Utilization
}
