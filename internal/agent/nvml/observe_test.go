// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestAGPUOfUnknownMemory(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.GB10, sim.T4)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(inv.Devices[0].MemoryMiB).To(BeZero())
	g.Expect(inv.Devices[0].Product).To(Equal("NVIDIA GB10"))
	g.Expect(inv.Devices[1].MemoryMiB).To(Equal(int64(15360)))
}

// A node whose GPUs are all bound to vfio-pci, for virtual machines.
func TestANodeWithoutAGPUThatNVMLKnows(t *testing.T) {
	g := NewWithT(t)
	h := on(t)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(inv.Devices).To(BeEmpty())
}

func TestEarlyR535DriversTellWrongProcesses(t *testing.T) {
	for version, unknown := range map[string]bool{
		"535.43.02": true, "535.54.03": true, "535.86.05": true, "535.86.10": false, "535.104.05": false, "530.41.03": false, "580.95.05": false,
		"535": true, "unknown": true, "600.10": false,
	} {
		t.Run(version, func(t *testing.T) {
			g := NewWithT(t)
			h := on(t, sim.T4)
			own := must(driver(t).Node()).DriverVersion
			uuid := must(driver(t).Node()).GPUs[0].UUID
			_, err := h.Observe(t.Context()) // opens the library, whose version is another one than that of this module
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(driver(t).LoadModule(version)).To(Succeed())
			t.Cleanup(func() { g.Expect(driver(t).LoadModule(own)).To(Succeed()) })
			processes := []gpu.Process{
				{PID: 900001, Instance: gpu.WholeGPU}, {PID: 900002, Instance: gpu.WholeGPU},
			}
			for _, p := range processes {
				g.Expect(driver(t).AddProcess(uuid, p)).To(Succeed())
			}
			inv, err := h.Observe(t.Context())
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(inv.Devices[0].ProcessesUnknown).To(Equal(unknown))
			if unknown {
				processes = nil
			}
			g.Expect(inv.Devices[0].Processes).To(Equal(processes))
		})
	}
}
