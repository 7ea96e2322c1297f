// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// noInstance is what NVML reports as the GPU instance of a process that uses none.
const noInstance = 0xFFFFFFFF

// lists reports whether the driver's lists of processes can be used.
type lists bool

const (
	usable   lists = true
	unusable lists = false
)

// listsOf tells that of a driver version. Drivers from 535.43.02 to 535.86.05 fill the lists with structures of another
// size than their header says, so that all PIDs but the first are wrong (NVIDIA/go-nvml issue 75, XuehaiPan/nvitop pull
// request 89). A version in another form may be one of them.
func listsOf(driverVersion string) lists {
	var branch, minor, patch int
	if n, _ := fmt.Sscanf(driverVersion, "%d.%d.%d", &branch, &minor, &patch); n < 2 {
		return unusable
	}
	if branch != 535 {
		return usable
	}
	if minor < 43 || minor > 86 || minor == 86 && patch > 5 {
		return usable
	}
	return unusable
}

// eachProcess visits who computes or draws on the GPU and who does so through MPS. A process may be in several lists.
func (r reader) eachProcess(handle nvml.Device, visit func(p nvml.ProcessInfo, throughMPS bool)) error {
	for _, list := range []struct {
		call       string
		read       func() ([]nvml.ProcessInfo, nvml.Return)
		throughMPS bool
	}{
		{"nvmlDeviceGetComputeRunningProcesses", handle.GetComputeRunningProcesses, false},
		{"nvmlDeviceGetGraphicsRunningProcesses", handle.GetGraphicsRunningProcesses, false},
		{"nvmlDeviceGetMPSComputeRunningProcesses", handle.GetMPSComputeRunningProcesses, true},
	} {
		if !r.has(list.call) {
			continue
		}
		processes, ret := list.read()
		if ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_SUPPORTED {
			return callError(list.call, ret)
		}
		for _, p := range processes {
			visit(p, list.throughMPS)
		}
	}
	return nil
}

// readProcesses lists the processes of a GPU, each once per instance. Their names are not asked for: NVIDIA's library reads
// them from the memory of the process, which may keep it waiting for ever.
func (r reader) readProcesses(handle nvml.Device, d *gpu.Device) error {
	seen := map[nvml.ProcessInfo]bool{}
	err := r.eachProcess(handle, func(p nvml.ProcessInfo, _ bool) {
		seen[nvml.ProcessInfo{Pid: p.Pid, GpuInstanceId: p.GpuInstanceId}] = true
	})
	if err != nil {
		return err
	}
	for p := range seen {
		d.Processes = append(d.Processes, gpu.Process{PID: int(p.Pid), Instance: instanceOf(p)})
	}
	slices.SortFunc(d.Processes, func(a, b gpu.Process) int {
		return cmp.Or(a.PID-b.PID, a.Instance-b.Instance)
	})
	return nil
}

// instanceOf is the GPU instance of a process.
func instanceOf(p nvml.ProcessInfo) int {
	if p.GpuInstanceId == noInstance {
		return gpu.WholeGPU
	}
	return int(p.GpuInstanceId)
}
