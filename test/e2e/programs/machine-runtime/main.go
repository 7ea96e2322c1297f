// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command machine-runtime is runc on a machine inside a machine: a container sees the boot id of the machine in which it
// runs, and not that of the kernel below, which does not boot anew when that machine does.
package main

import (
	"fmt"
	"os"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/oci"
)

const (
	// bootID is what the kernel shows, and in this machine what it has mounted there.
	bootID = "/proc/sys/kernel/random/boot_id"
	// hookArgument makes this program the hook that mounts it.
	hookArgument = "mount-boot-id"
)

func main() {
	err := run(os.Args)
	fmt.Fprintln(os.Stderr, "machine-runtime:", err)
	os.Exit(1)
}

// run ends only with an error, or by becoming runc.
func run(args []string) error {
	if len(args) == 2 && args[1] == hookArgument {
		if err := oci.Mount(os.Stdin, bootID, bootID); err != nil {
			return err
		}
		os.Exit(0)
	}
	return oci.Become(args, func(c oci.Config) error { return c.AddHook(hookArgument) })
}
