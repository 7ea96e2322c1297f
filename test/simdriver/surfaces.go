// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// Character device numbers. The kernel has given NVIDIA the first one. The others are dynamic, so that programs must
// read them from /proc/devices; these are free on most machines.
const (
	MajorGPU  = 195
	MajorUVM  = 240
	MajorCaps = 241
)

const (
	// pciDevices is the PCI bus, which NVIDIA's mig-parted reads beside NVML. It lies in the driver root as it would in
	// the root of the node; the one who runs such a program mounts it where the program looks.
	pciDevices = "sys/bus/pci/devices"
	// kernelFolder, in the folder of the state, is what the kernel module shows in /proc. There every program that may
	// change the state may change it too.
	kernelFolder = "proc"
)

// The numbers of GPUs and instances for which the driver reserves capabilities, whether they exist or not.
const (
	capGPUs, capInstances, capCompute = 32, 15, 8
	minorConfig, minorMonitor         = 1, 2
)

// InstanceMinor is the minor number of the capability of a GPU instance, on the GPU with that minor number.
func InstanceMinor(gpu, gi int) int { return 3 + capInstances*(capCompute+1)*gpu + (capCompute+1)*gi }

// ComputeMinor is the minor number of the capability of a compute instance.
func ComputeMinor(gpu, gi, ci int) int { return InstanceMinor(gpu, gi) + 1 + ci }

// migMinors lists the capabilities of all instances that could exist, as /proc/driver/nvidia-caps/mig-minors does.
var migMinors = sync.OnceValue(func() string { //nolint:gochecknoglobals // 100 KiB that never change
	var b strings.Builder
	fmt.Fprintf(&b, "config %d\nmonitor %d\n", minorConfig, minorMonitor)
	for gpu := range capGPUs {
		for gi := range capInstances {
			fmt.Fprintf(&b, "gpu%d/gi%d/access %d\n", gpu, gi, InstanceMinor(gpu, gi))
			for ci := range capCompute {
				fmt.Fprintf(&b, "gpu%d/gi%d/ci%d/access %d\n", gpu, gi, ci, ComputeMinor(gpu, gi, ci))
			}
		}
	}
	return b.String()
})

// kernelFiles is what the kernel shows in /proc, by path.
func kernelFiles(s *State) map[string]string {
	files := map[string]string{"devices": otherDevices, "modules": ""}
	if s.Unloaded {
		return files
	}
	files["devices"] = fmt.Sprintf("Character devices:\n  1 mem\n  5 /dev/tty\n%d nvidia\n%d nvidia-modeset\n%d nvidiactl\n%d nvidia-uvm\n%d nvidia-caps\n\n"+
		"Block devices:\n259 blkext\n", MajorGPU, MajorGPU, MajorGPU, MajorUVM, MajorCaps)
	files["modules"] = "nvidia 62722048 0 - Live 0x0000000000000000 (O)\n"
	if s.Node.DRM {
		files["modules"] += "nvidia_drm 131072 0 - Live 0x0000000000000000 (O)\n"
	}
	files["driver/nvidia-caps/mig-minors"] = migMinors()
	files["driver/nvidia/version"] = "NVRM version: NVIDIA UNIX Open Kernel Module  " + s.Node.DriverVersion + "\n"
	files["driver/nvidia/params"] = "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n"
	files["driver/nvidia/capabilities/mig/config"] = access(minorConfig, 0o400)
	files["driver/nvidia/capabilities/mig/monitor"] = access(minorMonitor, 0o444)
	for minor := range s.Node.GPUs {
		showGPU(files, minor, &s.Node.GPUs[minor])
	}
	return files
}

const otherDevices = "Character devices:\n  1 mem\n  5 /dev/tty\n\nBlock devices:\n259 blkext\n"

func showGPU(files map[string]string, minor int, g *sim.GPU) {
	files["driver/nvidia/gpus/"+g.PCIBusID+"/information"] = fmt.Sprintf(
		"Model: \t\t %s\nGPU UUID: \t %s\nBus Type: \t PCIe\nBus Location: \t %s\nDevice Minor: \t %d\n", g.Spec().Product, g.UUID, g.PCIBusID, minor)
	for _, i := range g.Instances {
		folder := fmt.Sprintf("driver/nvidia/capabilities/gpu%d/mig/gi%d", minor, i.ID)
		files[folder+"/access"] = access(InstanceMinor(minor, i.ID), 0o444)
		for _, c := range i.Compute {
			files[fmt.Sprintf("%s/ci%d/access", folder, c.ID)] = access(ComputeMinor(minor, i.ID, c.ID), 0o444)
		}
	}
}

// access is the file of a capability, whose numbers are decimal.
func access(minor, mode int) string {
	return fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: 1\n", minor, mode)
}

// showKernel changes what the kernel shows from one set of files to another, in the folder of the state.
func showKernel(state *os.Root, before, after map[string]string) error {
	for file := range before {
		if _, stays := after[file]; !stays {
			if err := vanish(state, file); err != nil {
				return err
			}
		}
	}
	for file, content := range after {
		if shown, ok := before[file]; ok && shown == content {
			continue
		}
		if err := appear(state, path.Join(kernelFolder, file), content); err != nil {
			return err
		}
	}
	return nil
}

// appear writes a file whole, for readers who ask nobody.
func appear(state *os.Root, file, content string) error {
	if err := state.MkdirAll(path.Dir(file), 0o755); err != nil {
		return err
	}
	const next = "kernel.next"
	if err := state.WriteFile(next, []byte(content), 0o644); err != nil {
		return err
	}
	return state.Rename(next, file)
}

// vanish removes a file, and the folders that it leaves empty.
func vanish(state *os.Root, file string) error {
	if err := state.Remove(path.Join(kernelFolder, file)); err != nil && !os.IsNotExist(err) {
		return err
	}
	for folder := path.Dir(file); folder != "driver" && folder != "."; folder = path.Dir(folder) {
		_ = state.Remove(path.Join(kernelFolder, folder)) // stays while others are in it
	}
	return nil
}

// writePCIDevices writes what the kernel would show of the GPUs of a node on the PCI bus.
func writePCIDevices(root string, n *sim.Node) error {
	if err := os.RemoveAll(filepath.Join(root, pciDevices)); err != nil {
		return err
	}
	for i := range n.GPUs {
		if err := writePCI(filepath.Join(root, pciDevices, n.GPUs[i].PCIBusID), n.GPUs[i].Spec()); err != nil {
			return err
		}
	}
	return nil
}

// writePCI writes the folder of one PCI device: a 3D controller of NVIDIA's, without memory of its own to map.
func writePCI(folder string, spec sim.Spec) error {
	device := spec.PCIDeviceID >> 16
	config := make([]byte, 256)
	copy(config, []byte{0xde, 0x10, byte(device), byte(device >> 8)})
	for name, content := range map[string]string{
		"vendor": "0x10de\n", "device": fmt.Sprintf("0x%04x\n", device), "class": "0x030200\n",
		"subsystem_vendor": "0x10de\n", "subsystem_device": "0x1470\n", "numa_node": "0\n", "config": string(config),
		"resource": strings.Repeat("0x0000000000000000 0x0000000000000000 0x0000000000000000\n", 13),
	} {
		if err := writeFile(filepath.Join(folder, name), content); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(path, content string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(content), 0o644)
}
