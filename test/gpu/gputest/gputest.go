// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gputest is the contract that every gpu.Hardware passes: the simulated one, NVML over the simulated driver,
// and a real GPU, which runs the cases that only read. A simulator that nobody holds against the thing is a lie.
package gputest

import (
	"maps"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// The models that the cases ask for, as package sim names them.
const (
	a100 = "a100-40gb"
	h100 = "h100-80gb"
	t4   = "t4"
	gb10 = "gb10"
	vgpu = "vgpu"
)

// Fixture is a node with GPUs of the models asked for, MIG off, nobody using them. Real hardware has no Rig: cases that
// change something, or need one, are skipped, and it may ignore the models.
type Fixture struct {
	Hardware gpu.Hardware
	Rig      Rig
}

// Rig does to the hardware what is not for gpu.Hardware to do.
type Rig interface {
	Programs
	Machine
	Host
}

// Programs are others that use the GPUs.
type Programs interface {
	// AddProcess puts a process on a GPU or on one of its instances.
	AddProcess(uuid string, p gpu.Process)
	// SetUse says how a process uses the GPU.
	SetUse(uuid string, use gpu.ProcessUse)
	// RemoveProcess ends a process.
	RemoveProcess(pid int)
	// HoldOpen opens the GPUs as another program would, until release.
	HoldOpen() (release func())
	// HoldInstances takes handles of all MIG devices as DCGM does, which is no process on them, until release.
	HoldInstances() (release func())
}

// Host is what a vGPU depends on outside its guest.
type Host interface {
	// TakeLicense takes the license of a vGPU.
	TakeLicense(uuid string)
}

// Machine is what holds the GPUs, and their driver.
type Machine interface {
	// SetPersistence turns persistence mode on or off; Persistence tells it.
	SetPersistence(uuid string, on bool)
	Persistence(uuid string) bool
	// ForbidReset makes resets of a GPU impossible, as in a virtual machine.
	ForbidReset(uuid string)
	// Switch connects the GPUs through NVSwitches that no fabric manager manages.
	Switch()
	// CreatePartial creates a GPU instance whose compute instance has so many slices; with 0 it has none.
	CreatePartial(uuid, profile string, at gpu.Placement, slices int)
	// FailComputeInstances makes the creation of the next compute instance fail.
	FailComputeInstances()
	// Reboot boots the node anew.
	Reboot()
}

// Contract checks hardware. node makes a node with a GPU for each of the models, in that order.
func Contract(t *testing.T, node func(t *testing.T, models ...string) Fixture) {
	t.Helper()
	for name, c := range cases() {
		t.Run(name, func(t *testing.T) {
			f := node(t, c.models...)
			if c.changes && f.Rig == nil {
				t.Skip("changes the hardware")
			}
			c.check(bench{T: t, WithT: NewWithT(t), Fixture: f})
		})
	}
}

// contractCase is one rule. It starts on a node with these models.
type contractCase struct {
	models  []string
	changes bool
	check   func(b bench)
}

func cases() map[string]contractCase {
	all := map[string]contractCase{}
	for _, group := range []map[string]contractCase{observing(), sampling(), settingMode(), instances(), sharing()} {
		maps.Copy(all, group)
	}
	return all
}

// bench is what a case works with.
type bench struct {
	*testing.T
	*WithT
	Fixture
}

func (b bench) observe() gpu.Inventory {
	b.Helper()
	inv, err := b.Hardware.Observe(b.Context())
	b.Expect(err).NotTo(HaveOccurred())
	return inv
}

func (b bench) device(index int) gpu.Device {
	b.Helper()
	inv := b.observe()
	b.Expect(len(inv.Devices)).To(BeNumerically(">", index))
	return inv.Devices[index]
}

// uuid is that of the first GPU.
func (b bench) uuid() string {
	b.Helper()
	return b.device(0).UUID
}

// migOn turns MIG on the first GPU.
func (b bench) migOn() string {
	b.Helper()
	uuid := b.uuid()
	b.Expect(b.Hardware.SetMIG(b.Context(), uuid, true)).To(Succeed())
	return uuid
}

func (b bench) create(uuid, profile string, start, size int) error {
	return b.Hardware.CreateInstance(b.Context(), uuid, profile, gpu.Placement{Start: start, Size: size})
}
