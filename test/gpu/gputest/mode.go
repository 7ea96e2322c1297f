// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	"errors"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func settingMode() map[string]contractCase {
	return map[string]contractCase{
		"turns MIG on and off at once on an idle GPU":          {models: []string{a100}, changes: true, check: toggle},
		"turns MIG on and off on Hopper":                       {models: []string{h100}, changes: true, check: toggle},
		"leaves other GPUs alone":                              {models: []string{h100, h100}, changes: true, check: bystander},
		"has no MIG where there is none":                       {models: []string{t4}, changes: true, check: noMIG},
		"notes a mode that instances forbid, for the reset":    {models: []string{h100}, changes: true, check: pendingByInstances},
		"notes a mode that another program forbids, on Ampere": {models: []string{a100}, changes: true, check: pendingByClient},
		"does not mind other programs on Hopper":               {models: []string{h100}, changes: true, check: hopperWithClient},
		"does not reset a GPU that is used":                    {models: []string{a100}, changes: true, check: resetBusy},
		"resets a GPU in persistence mode and leaves it in it": {models: []string{a100}, changes: true, check: resetPersistent},
		"turns persistence mode on and off":                    {models: []string{t4}, changes: true, check: persistence},
		"resets GPUs together that cannot be reset alone":      {models: []string{a100, a100, t4}, changes: true, check: resetTogether},
		"says that only a reboot helps":                        {models: []string{a100}, changes: true, check: noReset},
		"keeps the mode over a reboot on Ampere":               {models: []string{a100}, changes: true, check: rebootAmpere},
		"loses the mode with a reboot on Hopper":               {models: []string{h100}, changes: true, check: rebootHopper},
	}
}

func toggle(b bench) {
	uuid := b.uuid()
	for _, on := range []bool{true, true, false, false} { // asking for what is so is no error
		b.Expect(b.Hardware.SetMIG(b.Context(), uuid, on)).To(Succeed())
		d := b.device(0)
		b.Expect(d.State.MIG).To(Equal(on))
		b.Expect(d.PendingMIG).To(Equal(on))
	}
}

func bystander(b bench) {
	before := b.device(1)
	uuid := b.migOn()
	b.Expect(b.create(uuid, "1g.10gb", 0, 1)).To(Succeed())
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(Succeed())
	b.Expect(b.device(1)).To(Equal(before))
}

func noMIG(b bench) {
	d := b.device(0)
	b.Expect(d.MIGCapable).To(BeFalse())
	b.Expect(b.Hardware.SetMIG(b.Context(), d.UUID, true)).To(MatchError(gpu.ErrNotSupported))
}

func pendingByInstances(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "1g.10gb", 0, 1)).To(Succeed())
	b.Expect(b.Hardware.SetMIG(b.Context(), uuid, false)).To(MatchError(gpu.ErrResetRequired))
	d := b.device(0)
	b.Expect(d.State.MIG).To(BeTrue())
	b.Expect(d.PendingMIG).To(BeFalse())
	b.Expect(d.State.Instances).To(HaveLen(1))
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(Succeed())
	d = b.device(0)
	b.Expect(d.State.MIG).To(BeFalse())
	b.Expect(d.State.Instances).To(BeEmpty())
}

func pendingByClient(b bench) {
	uuid := b.uuid()
	release := b.Rig.HoldOpen()
	err := b.Hardware.SetMIG(b.Context(), uuid, true)
	b.Expect(err).To(MatchError(gpu.ErrResetRequired))
	b.Expect(err).To(MatchError(ContainSubstring("IN_USE")), "why it is pending")
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(MatchError(gpu.ErrBusy))
	b.Expect(b.device(0).State.MIG).To(BeFalse())
	release()
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(Succeed())
	b.Expect(b.device(0).State.MIG).To(BeTrue())
}

func hopperWithClient(b bench) {
	release := b.Rig.HoldOpen()
	defer release()
	b.migOn()
	b.Expect(b.device(0).State.MIG).To(BeTrue())
}

func resetBusy(b bench) {
	uuid := b.uuid()
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "python3", Instance: gpu.WholeGPU})
	b.Expect(b.Hardware.SetMIG(b.Context(), uuid, true)).To(MatchError(gpu.ErrResetRequired))
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(MatchError(gpu.ErrBusy))
	b.Expect(b.device(0).State.MIG).To(BeFalse())
}

func resetPersistent(b bench) {
	uuid := b.uuid()
	b.Rig.SetPersistence(uuid, true)
	b.Expect(b.Hardware.SetMIG(b.Context(), uuid, true)).To(MatchError(gpu.ErrResetRequired))
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(Succeed())
	b.Expect(b.device(0).State.MIG).To(BeTrue())
	b.Expect(b.Rig.Persistence(uuid)).To(BeTrue())
	release := b.Rig.HoldOpen()
	defer release()
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(MatchError(gpu.ErrBusy))
	b.Expect(b.Rig.Persistence(uuid)).To(BeTrue(), "also after a reset that failed")
}

func resetTogether(b bench) {
	b.Rig.Switch()
	first, second := b.device(0), b.device(1)
	b.Expect(first.ResetPeers).To(BeEmpty(), "only a reset tells")
	b.Expect(b.Hardware.SetMIG(b.Context(), first.UUID, true)).To(MatchError(gpu.ErrResetRequired))
	err := b.Hardware.Reset(b.Context(), first.UUID)
	peers, ok := errors.AsType[*gpu.PeersError](err)
	b.Expect(ok).To(BeTrue(), "%v", err)
	b.Expect(peers.PCIBusIDs).To(Equal([]string{second.PCIBusID}))
	b.Expect(b.device(0).State.MIG).To(BeFalse())
	b.Expect(b.device(0).ResetPeers).To(Equal([]string{second.UUID}))
	b.Expect(b.device(1).ResetPeers).To(Equal([]string{first.UUID}))
	b.Expect(b.device(2).ResetPeers).To(BeEmpty())

	b.Rig.AddProcess(second.UUID, gpu.Process{PID: 900001, Name: "python3", Instance: gpu.WholeGPU})
	b.Expect(b.Hardware.Reset(b.Context(), first.UUID, second.UUID)).To(MatchError(gpu.ErrBusy))
	b.Rig.RemoveProcess(900001)
	b.Expect(b.Hardware.Reset(b.Context(), first.UUID, second.UUID)).To(Succeed())
	b.Expect(b.device(0).State.MIG).To(BeTrue())
	b.Expect(b.device(0).ResetPeers).To(BeEmpty(), "a fabric manager may run before the next reset, which tells again")
}

func noReset(b bench) {
	uuid := b.uuid()
	b.Rig.ForbidReset(uuid)
	err := b.Hardware.SetMIG(b.Context(), uuid, true)
	b.Expect(err).To(MatchError(gpu.ErrResetRequired))
	b.Expect(err).To(MatchError(ContainSubstring("RESET_REQUIRED")))
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(MatchError(gpu.ErrNotSupported))
	b.Rig.Reboot()
	b.Expect(b.device(0).State.MIG).To(BeTrue())
}

func rebootAmpere(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "1g.5gb", 0, 1)).To(Succeed())
	b.Rig.Reboot()
	d := b.device(0)
	b.Expect(d.State.MIG).To(BeTrue())
	b.Expect(d.State.Instances).To(BeEmpty())
}

func rebootHopper(b bench) {
	b.migOn()
	b.Rig.Reboot()
	d := b.device(0)
	b.Expect(d.State.MIG).To(BeFalse())
	b.Expect(d.PendingMIG).To(BeFalse())
}

func persistence(b bench) {
	uuid := b.uuid()
	for _, on := range []bool{true, true, false, false} {
		b.Expect(b.Hardware.SetPersistence(b.Context(), uuid, on)).To(Succeed())
		b.Expect(b.Rig.Persistence(uuid)).To(Equal(on))
		if on {
			b.Expect(b.device(0).Persistence).To(Equal(gpu.PersistenceOn))
		}
	}
}
