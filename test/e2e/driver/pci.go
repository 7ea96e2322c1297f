// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// pciBus is where the kernel lists what is on the PCI bus.
const pciBus = "/sys/bus/pci"

// showPCI puts the simulated GPUs on the machine's PCI bus, on which Node Feature Discovery looks for them. The folder
// above the devices is mounted, because other GPUs replace the folder of the devices.
func showPCI() error {
	from := filepath.Join(machineRoot, pciBus)
	if err := os.MkdirAll(from, 0o755); err != nil {
		return fmt.Errorf("making the PCI bus: %w", err)
	}
	// The one of a machine that was there before is gone.
	if err := unix.Unmount(pciBus, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmounting the PCI bus: %w", err)
	}
	if err := unix.Mount(from, pciBus, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting the PCI bus: %w", err)
	}
	return nil
}
