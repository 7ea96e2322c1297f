// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/uuid"
)

const (
	// kernelBootID is where the kernel shows its boot id.
	kernelBootID = "/proc/sys/kernel/random/boot_id"
	// machineBootID is what this machine shows there instead: the kernel below boots only once.
	machineBootID = "/run/boot_id"
)

// showBootID gives the machine a boot id of its own, which kubelet and agents read where the kernel's is.
func showBootID() error {
	_, err := os.Stat(machineBootID)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := newBoot(); err != nil {
		return err
	}
	if err := unix.Mount(machineBootID, kernelBootID, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting the machine's boot id: %w", err)
	}
	return nil
}

// newBoot changes the boot id.
func newBoot() error {
	if err := os.WriteFile(machineBootID, []byte(uuid.NewUUID()+"\n"), 0o444); err != nil {
		return fmt.Errorf("writing the machine's boot id: %w", err)
	}
	return nil
}
