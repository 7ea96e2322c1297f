// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"os"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// A driver container's root holds a whole distribution, whose C library need not be of the version that ours is.
func TestTheDriversProgramsDoNotTakeTheDriverRootsCLibrary(t *testing.T) {
	m := newMachine(t)
	m.install(containerRoot)
	program, err := os.ReadFile("/bin/echo")
	m.Expect(err).NotTo(HaveOccurred())
	m.write(containerRoot+"/usr/bin/nvidia-smi", string(program))
	m.write(containerRoot+"/usr/lib64/libc.so.6", "of another version")
	command, err := m.find().Outside("nvidia-smi", "ran")
	m.Expect(err).NotTo(HaveOccurred())
	stdout, err := host.Exec{}.Run(t.Context(), command)
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(stdout).To(Equal("ran\n"))
}
