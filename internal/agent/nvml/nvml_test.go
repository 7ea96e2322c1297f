// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// What NVML tells is what the rules hold, for each GPU of the catalogue; the names of profiles, which are derived from
// sizes on one side and read from the table on the other, included.
func TestNVMLTellsWhatIsSoOfEveryModel(t *testing.T) {
	for _, model := range sim.Models() {
		t.Run(string(model), func(t *testing.T) {
			g := NewWithT(t)
			h := on(t, model)
			expectSame(t, h)
			spec, err := sim.SpecOf(model)
			g.Expect(err).NotTo(HaveOccurred())
			for _, p := range spec.Profiles {
				g.Expect(driver(t).Update(func(s *simdriver.State) error {
					n := &s.Node
					n.Reboot()
					if _, err := n.SetMIG(n.GPUs[0].UUID, true, 0); err != nil {
						return err
					}
					for range p.Max {
						i, err := n.CreateGPUInstance(n.GPUs[0].UUID, p.ID, nil)
						if err != nil {
							return err
						}
						if _, err := n.CreateComputeInstance(n.GPUs[0].UUID, i.ID, p.Slices); err != nil {
							return err
						}
					}
					return nil
				})).To(Succeed())
				expectSame(t, h)
			}
		})
	}
}

func expectSame(t *testing.T, h *nvml.Hardware) {
	t.Helper()
	g := NewWithT(t)
	seen := observed(t, h)
	n, err := driver(t).Node()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(seen).To(Equal(n.Observe()))
}

func TestAnotherProcessSeesTheSame(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.A100, sim.T4)
	inv := observed(t, h)
	g.Expect(h.SetMIG(t.Context(), inv.Devices[0].UUID, true)).To(Succeed())
	g.Expect(h.CreateInstance(t.Context(), inv.Devices[0].UUID, "3g.20gb", gpu.Placement{Start: 4, Size: 4})).To(Succeed())
	inv = observed(t, h)

	self, err := os.Executable()
	g.Expect(err).NotTo(HaveOccurred())
	other := exec.CommandContext(t.Context(), self)
	other.Env = append(os.Environ(), observeEnv+"="+filepath.Join(driver(t).Root(), "usr", "lib64", "libnvidia-ml.so.1"))
	out, err := other.Output()
	g.Expect(err).NotTo(HaveOccurred())
	var seen gpu.Inventory
	g.Expect(json.Unmarshal(out, &seen)).To(Succeed())
	g.Expect(seen).To(Equal(inv))
}

func TestACallThatHangsHoldsNobodyLongerThanItsContext(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.A100)
	inv := observed(t, h)
	uuid := inv.Devices[0].UUID
	hang := simdriver.Fault{Call: "nvmlDeviceGetHandleByUUID", Hang: 3 * time.Second, Times: 1}
	g.Expect(driver(t).AddFault(hang)).To(Succeed())

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := h.SetMIG(ctx, uuid, true)
	g.Expect(err).To(MatchError(context.DeadlineExceeded))
	g.Expect(err).To(MatchError(ContainSubstring("setting MIG mode true on GPU " + uuid + ": NVML has not returned")))
	g.Expect(h.Close()).To(MatchError(gpu.ErrBusy))

	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = h.Observe(ctx)
	g.Expect(err).To(MatchError(ContainSubstring("waiting for an earlier NVML operation to return")))

	inv = observed(t, h)
	g.Expect(inv.Devices[0].PendingMIG).To(BeFalse(), "what was abandoned before its write does not write")
}

func TestAnOperationWhoseCallerHasGoneDoesNotBegin(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.T4)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 { // an operation that begins is abandoned only now and then
		_, err := h.Observe(gone)
		g.Expect(err).To(MatchError(context.Canceled))
		g.Expect(h.Close()).To(Succeed())
	}
}

func TestReturnsBecomeSentinels(t *testing.T) {
	cases := map[string]struct {
		ret  sim.Return
		want error
		text string
	}{
		"in use":                 {sim.InUse, gpu.ErrBusy, "nvmlDeviceSetMigMode: ERROR_IN_USE: in use"},
		"not supported":          {sim.NotSupported, gpu.ErrNotSupported, "ERROR_NOT_SUPPORTED"},
		"insufficient resources": {sim.InsufficientResources, gpu.ErrInsufficient, "ERROR_INSUFFICIENT_RESOURCES"},
		"not found":              {sim.NotFound, gpu.ErrGone, "ERROR_NOT_FOUND"},
		"lost":                   {sim.GPUIsLost, gpu.ErrGone, "ERROR_GPU_IS_LOST"},
		"reset required":         {sim.ResetRequired, gpu.ErrResetRequired, "ERROR_RESET_REQUIRED"},
		"no permission":          {sim.NoPermission, gpu.ErrPermission, "ERROR_NO_PERMISSION"},
		"anything else":          {sim.Unknown, nil, "nvmlDeviceSetMigMode: ERROR_UNKNOWN"},
		"a number without name":  {sim.Return(77), nil, "nvmlDeviceSetMigMode: NVML return 77"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			h := on(t, sim.A100)
			inv := observed(t, h)
			g.Expect(driver(t).AddFault(simdriver.Fault{Call: "nvmlDeviceSetMigMode", Return: c.ret, Times: 1})).To(Succeed())
			err := h.SetMIG(t.Context(), inv.Devices[0].UUID, true)
			g.Expect(err).To(MatchError(ContainSubstring(c.text)))
			if c.want != nil {
				g.Expect(err).To(MatchError(c.want))
			}
		})
	}
}

// Whatever call fails while the node is observed, the observation fails: it never shows less than there is.
func TestAnObservationIsWholeOrFails(t *testing.T) {
	for _, call := range []string{
		"nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID",
		"nvmlDeviceGetName", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability",
		"nvmlDeviceGetMinorNumber", "nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetMigMode",
		"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstancePossiblePlacements", "nvmlDeviceGetMaxMigDeviceCount",
		"nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetInfo", "nvmlGpuInstanceGetComputeInstances", "nvmlComputeInstanceGetInfo",
		"nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses",
	} {
		t.Run(call, func(t *testing.T) {
			g := NewWithT(t)
			h := on(t, sim.H100)
			inv := observed(t, h)
			g.Expect(h.SetMIG(t.Context(), inv.Devices[0].UUID, true)).To(Succeed())
			g.Expect(h.CreateInstance(t.Context(), inv.Devices[0].UUID, "1g.10gb", gpu.Placement{Size: 1})).To(Succeed())
			g.Expect(h.Close()).To(Succeed())
			g.Expect(driver(t).AddFault(simdriver.Fault{Call: call, Return: sim.Unknown, Times: 1})).To(Succeed())
			_, err := h.Observe(t.Context())
			g.Expect(err).To(MatchError(ContainSubstring(call + ": ERROR_UNKNOWN")))
			expectSame(t, h)
		})
	}
}

func TestALibraryOfAnotherVersionThanTheKernelModule(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.A100)
	version := must(driver(t).Node()).DriverVersion
	g.Expect(driver(t).LoadModule("999.01")).To(Succeed())
	_, err := h.Observe(t.Context())
	g.Expect(err).To(MatchError(gpu.ErrDriverMismatch))
	g.Expect(err).To(MatchError(ContainSubstring("nvmlInit: ERROR_LIB_RM_VERSION_MISMATCH")))
	g.Expect(driver(t).LoadModule(version)).To(Succeed())
	expectSame(t, h)
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func TestAGPUOfUnknownMemory(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.GB10, sim.T4)
	inv := observed(t, h)
	g.Expect(inv.Devices[0].MemoryMiB).To(BeZero())
	g.Expect(inv.Devices[0].Product).To(Equal("NVIDIA GB10"))
	g.Expect(inv.Devices[1].MemoryMiB).To(Equal(int64(15360)))
}

// A node whose GPUs are all bound to vfio-pci, for virtual machines.
func TestANodeWithoutAGPUThatNVMLKnows(t *testing.T) {
	g := NewWithT(t)
	h := on(t)
	inv := observed(t, h)
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
			inv := observed(t, h)
			g.Expect(inv.Devices[0].ProcessesUnknown).To(Equal(unknown))
			if unknown {
				processes = nil
			}
			g.Expect(inv.Devices[0].Processes).To(Equal(processes))
		})
	}
}

// TestASampleThatTookTooLongClosesTheDriver when it returns at last: its caller could not.
func TestASampleThatTookTooLongClosesTheDriver(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.A100)
	g.Expect(driver(t).AddFault(simdriver.Fault{Call: "nvmlDeviceGetHandleByIndex", Hang: time.Second, Times: 1})).To(Succeed())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := h.Sample(ctx)
	g.Expect(err).To(MatchError(context.DeadlineExceeded))
	g.Expect(h.Close()).To(MatchError(gpu.ErrBusy))
	g.Eventually(driver(t).UnloadModule).WithTimeout(10 * time.Second).WithPolling(100 * time.Millisecond).Should(Succeed())
}

func observed(t *testing.T, h *nvml.Hardware) gpu.Inventory {
	t.Helper()
	inv, err := h.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return inv
}
