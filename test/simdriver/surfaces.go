// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
)

// The PCI bus and the kernel's list of modules, which NVIDIA's mig-parted reads beside NVML. They lie in the driver root
// as they would in the root of the node; who runs such a program mounts them where it looks.
const (
	pciDevices  = "sys/bus/pci/devices"
	procModules = "proc/modules"
)

// writeSurfaces writes what the kernel would show of the GPUs of a node.
func writeSurfaces(root string, n *sim.Node) error {
	if err := os.RemoveAll(filepath.Join(root, pciDevices)); err != nil {
		return err
	}
	for i := range n.GPUs {
		if err := writePCI(filepath.Join(root, pciDevices, n.GPUs[i].PCIBusID), n.GPUs[i].Spec()); err != nil {
			return err
		}
	}
	return writeFile(filepath.Join(root, procModules), "nvidia 62722048 0 - Live 0x0000000000000000 (O)\n")
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
