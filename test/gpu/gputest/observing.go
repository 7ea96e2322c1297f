// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	"context"
	"slices"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func observing() map[string]contractCase {
	return map[string]contractCase{
		"says what each GPU is":                            {models: []string{a100, h100, t4}, check: identity},
		"sees the same twice":                              {models: []string{a100, t4}, check: repeatable},
		"describes MIG profiles that can be placed":        {models: []string{a100, h100}, check: profiles},
		"opens again after it was closed":                  {models: []string{a100}, check: reopen},
		"does nothing for a context that has ended":        {models: []string{a100}, check: cancelled},
		"knows no GPU of another node":                     {models: []string{a100}, check: unknownGPU},
		"tells whether a virtual GPU has its license":      {models: []string{vgpu, t4}, changes: true, check: license},
		"tells a virtual GPU, which cannot be split":       {models: []string{vgpu}, changes: true, check: virtual},
		"lists who uses the GPU, and the MPS server as it": {models: []string{t4}, changes: true, check: users},
		"does not know the memory of each GPU":             {models: []string{gb10}, changes: true, check: unknownMemory},
		"lists who uses an instance":                       {models: []string{h100}, changes: true, check: instanceUsers},
	}
}

func identity(b bench) {
	inv := b.observe()
	b.Expect(inv.DriverVersion).To(MatchRegexp(`^\d+\.\d+(\.\d+)?$`))
	b.Expect(inv.Devices).NotTo(BeEmpty())
	for i, d := range inv.Devices {
		b.Expect(d.UUID).To(MatchRegexp(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`))
		b.Expect(d.Index).To(Equal(i))
		b.Expect(d.PCIBusID).To(MatchRegexp(`^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`))
		b.Expect(d.Product).NotTo(BeEmpty())
		b.Expect(d.MemoryMiB).To(BeNumerically(">", 1000))
		b.Expect(d.ComputeCapability.Major).To(BeNumerically(">=", 5))
		b.Expect(d.State.MPS).To(BeNil(), "MPS is not the hardware's")
	}
	addresses := func(a, b gpu.Device) int {
		if a.PCIBusID < b.PCIBusID {
			return -1
		}
		return 1
	}
	b.Expect(slices.IsSortedFunc(inv.Devices, addresses)).To(BeTrue())
}

func repeatable(b bench) {
	first, second := b.observe(), b.observe()
	for i := range first.Devices { // processes come and go
		first.Devices[i].Processes, second.Devices[i].Processes = nil, nil
	}
	b.Expect(second).To(Equal(first))
}

func profiles(b bench) {
	for _, d := range b.observe().Devices {
		if !d.MIGCapable {
			b.Expect(d.Profiles).To(BeEmpty())
			continue
		}
		names := map[string]bool{}
		for i, p := range d.Profiles {
			names[p.Name] = true
			b.Expect(p.Name).To(MatchRegexp(`^[1-9]g\.\d+gb([+-][a-z.]+)*$`))
			b.Expect(p.Slices).To(BeNumerically(">", 0), p.Name)
			b.Expect(p.Max).To(BeNumerically(">", 0), p.Name)
			b.Expect(p.Size).To(BeNumerically(">", 0), p.Name)
			b.Expect(p.MemoryMiB).To(BeNumerically("<=", d.MemoryMiB), p.Name)
			b.Expect(p.Starts).NotTo(BeEmpty(), p.Name)
			b.Expect(slices.IsSorted(p.Starts)).To(BeTrue(), p.Name)
			b.Expect(i == 0 || d.Profiles[i-1].ID < p.ID).To(BeTrue(), "sorted by driver id")
		}
		b.Expect(names).To(HaveLen(len(d.Profiles)), "names are unique")
	}
}

func reopen(b bench) {
	before := b.observe()
	b.Expect(b.Hardware.Close()).To(Succeed())
	b.Expect(b.Hardware.Close()).To(Succeed(), "closing twice is closing")
	b.Expect(b.observe().Devices[0].UUID).To(Equal(before.Devices[0].UUID))
}

func cancelled(b bench) {
	uuid := b.uuid()
	ctx, cancel := context.WithCancel(b.Context())
	cancel()
	_, err := b.Hardware.Observe(ctx)
	b.Expect(err).To(MatchError(context.Canceled))
	b.Expect(b.Hardware.SetMIG(ctx, uuid, true)).To(MatchError(context.Canceled))
	b.Expect(b.Hardware.SetComputeMode(ctx, uuid, gpu.ComputeExclusiveProcess)).To(MatchError(context.Canceled))
	b.Expect(b.device(0).State.ComputeMode).To(Equal(gpu.ComputeDefault))
}

func unknownGPU(b bench) {
	const uuid = "GPU-00000000-0000-0000-0000-000000000000"
	b.Expect(b.Hardware.SetMIG(b.Context(), uuid, true)).To(MatchError(gpu.ErrGone))
	b.Expect(b.Hardware.SetComputeMode(b.Context(), uuid, gpu.ComputeDefault)).To(MatchError(gpu.ErrGone))
	b.Expect(b.create(uuid, "1g.5gb", 0, 1)).To(MatchError(gpu.ErrGone))
	err := b.Hardware.DestroyInstance(b.Context(), uuid, 1)
	b.Expect(err).To(MatchError(gpu.ErrGone))
	b.Expect(err).To(MatchError(ContainSubstring(uuid)), "the GPU is named")
}

func virtual(b bench) {
	d := b.device(0)
	b.Expect(d.Virtual).To(BeTrue())
	b.Expect(d.MIGCapable).To(BeFalse())
	b.Expect(b.Hardware.SetMIG(b.Context(), d.UUID, true)).To(MatchError(gpu.ErrNotSupported))
	b.Expect(b.Hardware.SetComputeMode(b.Context(), d.UUID, gpu.ComputeExclusiveProcess)).To(MatchError(gpu.ErrNotSupported))
}

func license(b bench) {
	b.Expect(b.device(0).License).To(Equal(gpu.Licensed))
	b.Expect(b.device(1).License).To(Equal(gpu.LicenseUnknown), "it is no vGPU")
	b.Rig.TakeLicense(b.device(0).UUID)
	b.Expect(b.device(0).License).To(Equal(gpu.Unlicensed))
}

func unknownMemory(b bench) {
	d := b.device(0)
	b.Expect(d.MemoryMiB).To(BeZero())
	b.Expect(b.Hardware.SetComputeMode(b.Context(), d.UUID, gpu.ComputeExclusiveProcess)).To(Succeed())
}

func users(b bench) {
	uuid := b.uuid()
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900002, Name: "python3", Instance: gpu.WholeGPU})
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "nvidia-cuda-mps-server", Instance: gpu.WholeGPU})
	var pids []int
	for _, p := range b.device(0).Processes { // their names are the kernel's to tell
		b.Expect(p.Instance).To(Equal(gpu.WholeGPU))
		pids = append(pids, p.PID)
	}
	b.Expect(pids).To(Equal([]int{900001, 900002}))
	b.Rig.RemoveProcess(900002)
	b.Rig.RemoveProcess(900001)
	b.Expect(b.device(0).Idle()).To(BeTrue())
}

func instanceUsers(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "3g.40gb", 0, 4)).To(Succeed())
	b.Expect(b.create(uuid, "3g.40gb", 4, 4)).To(Succeed())
	second := b.device(0).State.Instances[1]
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "python3", Instance: second.ID})
	d := b.device(0)
	b.Expect(d.InUse(second.ID)).To(BeTrue())
	b.Expect(d.InUse(d.State.Instances[0].ID)).To(BeFalse())
}
