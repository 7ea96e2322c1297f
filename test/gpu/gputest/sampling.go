// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	"context"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func sampling() map[string]contractCase {
	return map[string]contractCase{
		"measures the memory and the utilization of each GPU":   {models: []string{t4, t4}, check: measures},
		"measures each process":                                 {models: []string{t4, t4}, changes: true, check: measuresProcesses},
		"does not measure what the driver does not report":      {models: []string{gb10}, changes: true, check: measuresNothingUnknown},
		"measures MPS clients, but not their utilization":       {models: []string{t4}, changes: true, check: measuresMPSClients},
		"measures instances and their processes":                {models: []string{h100}, changes: true, check: measuresInstances},
		"measures no utilization of instances before Hopper":    {models: []string{a100}, changes: true, check: measuresNoCounters},
		"measures nothing for a context that has ended":         {models: []string{t4}, check: measuresInTime},
		"measures between two observations, which stay as seen": {models: []string{t4}, check: measuresOnly},
	}
}

func (b bench) sample() gpu.Sample {
	b.Helper()
	sample, err := b.Hardware.Sample(b.Context())
	b.Expect(err).NotTo(HaveOccurred())
	return sample
}

func measures(b bench) {
	devices := b.observe().Devices
	sample := b.sample()
	b.Expect(sample.Devices).To(HaveLen(len(devices)))
	for i, d := range sample.Devices {
		b.Expect(d.UUID).To(Equal(devices[i].UUID))
		b.Expect(d.Index).To(Equal(i))
		b.Expect(d.Minor).To(Equal(devices[i].Minor))
		if d.Memory == nil { // a real GPU that shares the memory of the host
			b.Expect(devices[i].MemoryMiB).To(BeZero())
			continue
		}
		b.Expect(d.Memory.Total >> 20).To(BeNumerically("~", devices[i].MemoryMiB, 1))
		b.Expect(d.Memory.Used + d.Memory.Free).To(BeNumerically("<=", d.Memory.Total))
		if d.Utilization != nil {
			b.Expect(d.Utilization.Compute).To(SatisfyAll(BeNumerically(">=", 0), BeNumerically("<=", 1)))
		}
	}
}

func measuresProcesses(b bench) {
	uuid := b.uuid()
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900002, Name: "python3", Instance: gpu.WholeGPU})
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "idle", Instance: gpu.WholeGPU})
	busy := gpu.ProcessUse{
		PID: 900002, Instance: gpu.WholeGPU, MemoryBytes: new(int64(3 << 30)), Utilization: &gpu.Utilization{Compute: 0.5, Memory: 0.25},
	}
	idle := gpu.ProcessUse{PID: 900001, Instance: gpu.WholeGPU, MemoryBytes: new(int64(1 << 30))}
	b.Rig.SetUse(uuid, busy)
	b.Rig.SetUse(uuid, idle)
	first, second := b.sample().Devices[0], b.sample().Devices[1]
	b.Expect(first.Processes).To(Equal([]gpu.ProcessUse{idle, busy}), "by PID; no utilization of the one that does nothing")
	b.Expect(first.Memory.Used).To(Equal(int64(4 << 30)))
	b.Expect(first.Memory.Free).To(Equal(first.Memory.Total - 4<<30))
	b.Expect(first.Utilization).To(Equal(&gpu.Utilization{Compute: 0.5, Memory: 0.25}))
	b.Expect(second.Processes).To(BeEmpty())
	b.Expect(second.Memory.Used).To(BeZero())
	b.Rig.RemoveProcess(900002)
	b.Expect(b.sample().Devices[0].Processes).To(Equal([]gpu.ProcessUse{idle}))
}

func measuresNothingUnknown(b bench) {
	uuid := b.uuid()
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "python3", Instance: gpu.WholeGPU})
	b.Rig.SetUse(uuid, gpu.ProcessUse{PID: 900001, Instance: gpu.WholeGPU})
	d := b.sample().Devices[0]
	b.Expect(d.Memory).To(BeNil(), "it shares the memory of the host")
	b.Expect(d.Processes).To(Equal([]gpu.ProcessUse{{PID: 900001, Instance: gpu.WholeGPU}}))
}

func measuresMPSClients(b bench) {
	uuid := b.uuid()
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "nvidia-cuda-mps-server", Instance: gpu.WholeGPU, MPSServer: true})
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900002, Name: "python3", Instance: gpu.WholeGPU})
	server := gpu.ProcessUse{
		PID: 900001, Instance: gpu.WholeGPU, MemoryBytes: new(int64(64 << 20)), Utilization: &gpu.Utilization{Compute: 0.75, Memory: 0.5},
	}
	client := gpu.ProcessUse{
		PID: 900002, Instance: gpu.WholeGPU, MPSClient: true, MemoryBytes: new(int64(2 << 30)), Utilization: &gpu.Utilization{Compute: 0.75},
	}
	b.Rig.SetUse(uuid, server)
	b.Rig.SetUse(uuid, client)
	client.Utilization = nil
	b.Expect(b.sample().Devices[0].Processes).To(Equal([]gpu.ProcessUse{server, client}))
}

func measuresInstances(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "3g.40gb", 0, 4)).To(Succeed())
	b.Expect(b.create(uuid, "3g.40gb", 4, 4)).To(Succeed())
	instances := b.device(0).State.Instances
	used := instances[1]
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "python3", Instance: used.ID})
	use := gpu.ProcessUse{PID: 900001, Instance: used.ID, MemoryBytes: new(int64(5 << 30)), Utilization: &gpu.Utilization{Compute: 0.75, Memory: 0.25}}
	b.Rig.SetUse(uuid, use)
	use.Utilization = nil
	d := b.sample().Devices[0]
	b.Expect(d.Utilization).To(BeNil(), "the driver does not report it in MIG mode")
	b.Expect(d.Processes).To(Equal([]gpu.ProcessUse{use}))
	b.Expect(d.Instances).To(HaveLen(2))
	for at, i := range d.Instances {
		b.Expect(i.UUID).To(HavePrefix("MIG-"))
		b.Expect([]int{i.ID, i.Start}).To(Equal([]int{instances[at].ID, instances[at].Placement.Start}), "either list is in the same order here")
		b.Expect(b.device(0).Profiles).To(ContainElement(SatisfyAll(HaveField("Name", instances[at].Profile), HaveField("ID", i.ProfileID))))
		b.Expect(i.Memory.Total).To(SatisfyAll(BeNumerically(">", 30<<30), BeNumerically("<", 41<<30)))
		if i.ID == used.ID {
			b.Expect(i.UUID).To(Equal(used.UUID))
			b.Expect(i.Memory.Used).To(Equal(int64(5 << 30)))
			b.Expect(i.Utilization).To(Equal(&gpu.Utilization{Compute: 0.75, Memory: 0.25}))
		} else {
			b.Expect(i.Memory.Used).To(BeZero())
			b.Expect(i.Utilization).To(Equal(&gpu.Utilization{}), "it is known that nothing works on it")
		}
	}
	b.Expect(d.Memory.Used).To(Equal(int64(5 << 30)))
}

func measuresNoCounters(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "3g.20gb", 0, 4)).To(Succeed())
	used := b.device(0).State.Instances[0]
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "python3", Instance: used.ID})
	b.Rig.SetUse(uuid, gpu.ProcessUse{
		PID: 900001, Instance: used.ID, MemoryBytes: new(int64(5 << 30)), Utilization: &gpu.Utilization{Compute: 1},
	})
	d := b.sample().Devices[0]
	b.Expect(d.Instances).To(HaveLen(1))
	b.Expect(d.Instances[0].Utilization).To(BeNil())
}

func measuresInTime(b bench) {
	ctx, cancel := context.WithCancel(b.Context())
	cancel()
	_, err := b.Hardware.Sample(ctx)
	b.Expect(err).To(MatchError(context.Canceled))
}

func measuresOnly(b bench) {
	before := b.observe()
	b.sample()
	after := b.observe()
	for i := range before.Devices { // processes come and go
		before.Devices[i].Processes, after.Devices[i].Processes = nil, nil
	}
	b.Expect(after).To(Equal(before))
}
