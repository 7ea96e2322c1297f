// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Observe implements gpu.Hardware. It is all or nothing: a GPU that cannot be read fails the observation, so that it is
// never taken for one that was removed.
func (h *Hardware) Observe(ctx context.Context) (gpu.Inventory, error) {
	var inv gpu.Inventory
	err := h.do(ctx, everyGPU, "observing the GPUs", func() error {
		seen, err := h.observe(ctx)
		if err == nil && ctx.Err() == nil {
			inv = seen
		}
		return errors.Join(err, ctx.Err())
	})
	if err != nil { // inv is not read: an abandoned operation may still write it
		return gpu.Inventory{}, err
	}
	return inv, nil
}

func (h *Hardware) observe(ctx context.Context) (gpu.Inventory, error) {
	version, ret := h.lib.SystemGetDriverVersion()
	if ret != nvml.SUCCESS {
		return gpu.Inventory{}, callError("nvmlSystemGetDriverVersion", ret)
	}
	count, ret := h.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return gpu.Inventory{}, callError("nvmlDeviceGetCount", ret)
	}
	if count == 0 {
		return gpu.Inventory{DriverVersion: version}, nil
	}
	devices, errs := make([]gpu.Device, count), make([]error, count)
	var looking sync.WaitGroup
	for index := range count {
		looking.Go(func() {
			devices[index], errs[index] = h.observeStill(ctx, index, listsOf(version))
		})
	}
	looking.Wait()
	if err := errors.Join(errs...); err != nil {
		return gpu.Inventory{}, err
	}
	h.group.describe(devices)
	return gpu.Inventory{DriverVersion: version, Devices: devices}, nil
}

// observeStill reads a GPU, again if that failed while other operations were going on: what one of them destroys
// vanishes under the reader's eyes.
func (h *Hardware) observeStill(ctx context.Context, index int, lists lists) (gpu.Device, error) {
	for {
		changed, others := h.gate.others()
		d, err := h.observeDevice(index, lists)
		if err == nil {
			return d, nil
		}
		if others {
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
		select {
		case <-changed: // an operation has ended, or one has begun since
			if ctx.Err() == nil {
				continue
			}
		default:
		}
		return gpu.Device{}, fmt.Errorf("GPU %d: %w", index, err)
	}
}

// reader reads one GPU. It changes nothing.
type reader struct{ *library }

func (r reader) observeDevice(index int, lists lists) (gpu.Device, error) {
	handle, ret := r.lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return gpu.Device{}, callError("nvmlDeviceGetHandleByIndex", ret)
	}
	d, err := identity(handle)
	if err != nil {
		return gpu.Device{}, err
	}
	d.Index = index
	readProcesses := r.readProcesses
	if lists == unusable {
		readProcesses = func(_ nvml.Device, d *gpu.Device) error {
			d.ProcessesUnknown = true
			return nil
		}
	}
	for _, read := range []func(nvml.Device, *gpu.Device) error{
		readMinor, r.readVirtual, readComputeMode, r.readPersistence, readMIGMode, r.readMIG, readProcesses,
	} {
		if err := read(handle, &d); err != nil {
			return gpu.Device{}, err
		}
	}
	return d, nil
}

func identity(handle nvml.Device) (gpu.Device, error) {
	uuid, uuidRet := handle.GetUUID()
	name, nameRet := handle.GetName()
	pci, pciRet := handle.GetPciInfo()
	memory, memoryRet := handle.GetMemoryInfo()
	if memoryRet == nvml.ERROR_NOT_SUPPORTED { // GPUs that share the memory of the host, such as GB10
		memory, memoryRet = nvml.Memory{}, nvml.SUCCESS
	}
	major, minor, capabilityRet := handle.GetCudaComputeCapability()
	err := errors.Join(
		callError("nvmlDeviceGetUUID", uuidRet), callError("nvmlDeviceGetName", nameRet), callError("nvmlDeviceGetPciInfo", pciRet),
		callError("nvmlDeviceGetMemoryInfo", memoryRet), callError("nvmlDeviceGetCudaComputeCapability", capabilityRet),
	)
	return gpu.Device{
		UUID: uuid, Product: name, PCIBusID: busID(pci), MemoryMiB: int64(memory.Total >> 20),
		ComputeCapability: gpu.ComputeCapability{Major: major, Minor: minor},
	}, err
}

// busID is the kernel's form of a PCI address: a domain of four digits where NVML has eight, and lower case.
func busID(pci nvml.PciInfo) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device)
}

func readMinor(handle nvml.Device, d *gpu.Device) error {
	minor, ret := handle.GetMinorNumber()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		d.Minor = -1
		return nil
	}
	d.Minor = minor
	return callError("nvmlDeviceGetMinorNumber", ret)
}

func (r reader) readVirtual(handle nvml.Device, d *gpu.Device) error {
	if !r.has("nvmlDeviceGetVirtualizationMode") {
		return nil
	}
	mode, ret := handle.GetVirtualizationMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return nil
	}
	d.Virtual = mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	if ret == nvml.SUCCESS && d.Virtual {
		d.License = r.license(handle)
	}
	return callError("nvmlDeviceGetVirtualizationMode", ret)
}

// licensableFeatures is the version of the call whose structure go-nvml has. Older drivers fill in a shorter one.
const licensableFeatures = "nvmlDeviceGetGridLicensableFeatures_v4"

// license is that of a vGPU. A license changes nothing about how GPUs are shared, so a failure to read it fails no
// observation.
func (r reader) license(handle nvml.Device) gpu.License {
	if !r.has(licensableFeatures) {
		return gpu.LicenseUnknown
	}
	features, ret := handle.GetGridLicensableFeatures()
	if ret != nvml.SUCCESS || features.IsGridLicenseSupported == 0 {
		return gpu.LicenseUnknown
	}
	license := gpu.LicenseUnknown
	for _, f := range features.GridLicensableFeatures[:min(int(features.LicensableFeaturesCount), len(features.GridLicensableFeatures))] {
		if f.FeatureState != 0 {
			return gpu.Licensed
		}
		license = gpu.Unlicensed
	}
	return license
}

func readComputeMode(handle nvml.Device, d *gpu.Device) error {
	mode, ret := handle.GetComputeMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return nil
	}
	d.State.ComputeMode = gpu.ComputeMode(mode)
	return callError("nvmlDeviceGetComputeMode", ret)
}

func (r reader) readPersistence(handle nvml.Device, d *gpu.Device) error {
	if !r.has("nvmlDeviceGetPersistenceMode") {
		return nil
	}
	mode, ret := handle.GetPersistenceMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return nil
	}
	if ret == nvml.SUCCESS && mode == nvml.FEATURE_DISABLED {
		d.Persistence = gpu.PersistenceOff
	}
	return callError("nvmlDeviceGetPersistenceMode", ret)
}

func readMIGMode(handle nvml.Device, d *gpu.Device) error {
	current, pending, ret := handle.GetMigMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return nil
	}
	d.MIGCapable = !d.Virtual // a guest may see the mode but not use it
	d.State.MIG = current == nvml.DEVICE_MIG_ENABLE
	d.PendingMIG = pending == nvml.DEVICE_MIG_ENABLE
	return callError("nvmlDeviceGetMigMode", ret)
}

func (r reader) readMIG(handle nvml.Device, d *gpu.Device) error {
	if !d.MIGCapable {
		return nil
	}
	all, err := r.profiles(handle)
	if err != nil {
		return err
	}
	if err := describeProfiles(handle, d, all); err != nil {
		return err
	}
	if !d.State.MIG {
		return nil
	}
	return readInstances(handle, d, all)
}

func describeProfiles(handle nvml.Device, d *gpu.Device, all []profile) error {
	for _, p := range all {
		described, ok, err := p.describe(handle)
		if err != nil {
			return err
		}
		if ok {
			d.Profiles = append(d.Profiles, described)
		}
	}
	return nil
}

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
