// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func instances() map[string]contractCase {
	return map[string]contractCase{
		"creates an instance where it is told to":               {models: []string{h100}, changes: true, check: createAndDestroy},
		"gives a new instance a new UUID":                       {models: []string{h100}, changes: true, check: newUUID},
		"creates no instance outside of MIG mode":               {models: []string{h100}, changes: true, check: migOff},
		"creates no instance over another":                      {models: []string{a100}, changes: true, check: overlap},
		"creates no second instance with media extensions":      {models: []string{a100}, changes: true, check: secondMedia},
		"creates no instance of a profile that there is not":    {models: []string{a100}, changes: true, check: unknownProfile},
		"creates both halves of an instance or none":            {models: []string{h100}, changes: true, check: allOrNothing},
		"sees an instance without its compute instance":         {models: []string{h100}, changes: true, check: orphan},
		"sees an instance with a smaller compute instance":      {models: []string{h100}, changes: true, check: smaller},
		"destroys no instance that is used":                     {models: []string{h100}, changes: true, check: destroyBusy},
		"destroys no instance to which a program has a handle":  {models: []string{h100}, changes: true, check: destroyHeld},
		"cannot destroy what does not exist":                    {models: []string{h100}, changes: true, check: destroyNothing},
		"leaves instances alone while others come and go":       {models: []string{a100}, changes: true, check: neighbours},
		"has every placement that a profile says it can have":   {models: []string{a100}, changes: true, check: everyPlacement},
		"has every placement that a profile of Hopper can have": {models: []string{h100}, changes: true, check: everyPlacement},
	}
}

func createAndDestroy(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "2g.20gb", 4, 2)).To(Succeed())
	d := b.device(0)
	b.Expect(d.State.Instances).To(HaveLen(1))
	i := d.State.Instances[0]
	b.Expect(i.Profile).To(Equal("2g.20gb"))
	b.Expect(i.Placement).To(Equal(gpu.Placement{Start: 4, Size: 2}))
	b.Expect(i.Partial).To(BeFalse())
	b.Expect(i.UUID).To(HavePrefix("MIG-"))
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, i.ID)).To(Succeed())
	b.Expect(b.device(0).State.Instances).To(BeEmpty())
}

func newUUID(b bench) {
	uuid := b.migOn()
	seen := map[string]bool{}
	for range 3 {
		b.Expect(b.create(uuid, "7g.80gb", 0, 8)).To(Succeed())
		i := b.device(0).State.Instances[0]
		seen[i.UUID] = true
		b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, i.ID)).To(Succeed())
	}
	b.Expect(seen).To(HaveLen(3))
}

func migOff(b bench) {
	b.Expect(b.create(b.uuid(), "1g.10gb", 0, 1)).To(MatchError(gpu.ErrNotSupported))
}

func overlap(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "1g.5gb", 4, 1)).To(Succeed())
	before := b.device(0)
	b.Expect(b.create(uuid, "3g.20gb", 4, 4)).To(MatchError(gpu.ErrInsufficient))
	b.Expect(b.create(uuid, "1g.5gb", 4, 1)).To(MatchError(gpu.ErrInsufficient))
	b.Expect(b.create(uuid, "3g.20gb", 1, 4)).NotTo(Succeed(), "no placement of the profile")
	b.Expect(b.device(0)).To(Equal(before))
}

func secondMedia(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "1g.5gb+me", 0, 1)).To(Succeed())
	b.Expect(b.create(uuid, "1g.5gb+me", 1, 1)).To(MatchError(gpu.ErrInsufficient))
	b.Expect(b.create(uuid, "1g.5gb", 1, 1)).To(Succeed())
}

func unknownProfile(b bench) {
	uuid := b.migOn()
	err := b.create(uuid, "3g.40gb", 0, 4)
	b.Expect(err).To(MatchError(gpu.ErrNotSupported))
	b.Expect(err).To(MatchError(ContainSubstring("no MIG profile 3g.40gb")))
}

func allOrNothing(b bench) {
	uuid := b.migOn()
	b.Rig.FailComputeInstances()
	b.Expect(b.create(uuid, "3g.40gb", 0, 4)).NotTo(Succeed())
	b.Expect(b.device(0).State.Instances).To(BeEmpty())
	b.Expect(b.create(uuid, "3g.40gb", 0, 4)).To(Succeed())
}

func orphan(b bench) {
	uuid := b.migOn()
	at := gpu.Placement{Start: 4, Size: 4}
	b.Rig.CreatePartial(uuid, "3g.40gb", at, 0)
	found := b.device(0).State.Instances
	b.Expect(found).To(HaveLen(1))
	b.Expect(found[0]).To(Equal(gpu.Instance{Profile: "3g.40gb", Placement: at, ID: found[0].ID, Partial: true}))
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, found[0].ID)).To(Succeed())
	b.Expect(b.device(0).State.Instances).To(BeEmpty())
}

func smaller(b bench) {
	uuid := b.migOn()
	b.Rig.CreatePartial(uuid, "3g.40gb", gpu.Placement{Start: 0, Size: 4}, 2)
	found := b.device(0).State.Instances
	b.Expect(found).To(HaveLen(1))
	b.Expect(found[0].Partial).To(BeTrue())
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, found[0].ID)).To(Succeed())
}

func destroyBusy(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "3g.40gb", 0, 4)).To(Succeed())
	before := b.device(0).State
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900001, Name: "python3", Instance: before.Instances[0].ID})
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, before.Instances[0].ID)).To(MatchError(gpu.ErrBusy))
	b.Expect(b.device(0).State).To(Equal(before))
	b.Rig.RemoveProcess(900001)
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, before.Instances[0].ID)).To(Succeed())
}

// destroyHeld is what DCGM does to others (NVIDIA/DCGM issue 276).
func destroyHeld(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "3g.40gb", 0, 4)).To(Succeed())
	release := b.Rig.HoldInstances()
	b.Expect(b.create(uuid, "3g.40gb", 4, 4)).To(Succeed())
	found := b.device(0)
	b.Expect(found.Processes).To(BeEmpty(), "nobody is to be seen")
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, found.State.Instances[0].ID)).To(MatchError(gpu.ErrBusy))
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, found.State.Instances[1].ID)).To(Succeed(), "it did not see that one")
	release()
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, found.State.Instances[0].ID)).To(Succeed())
}

func destroyNothing(b bench) {
	uuid := b.migOn()
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, 5)).To(MatchError(gpu.ErrGone))
}

func neighbours(b bench) {
	uuid := b.migOn()
	b.Expect(b.create(uuid, "3g.20gb", 4, 4)).To(Succeed())
	kept := b.device(0).State.Instances[0]
	b.Expect(b.create(uuid, "2g.10gb", 0, 2)).To(Succeed())
	b.Expect(b.create(uuid, "1g.5gb", 3, 1)).To(Succeed())
	found := b.device(0).State.Instances
	b.Expect(found).To(HaveLen(3))
	b.Expect([]int{found[0].Placement.Start, found[1].Placement.Start, found[2].Placement.Start}).To(Equal([]int{0, 3, 4}), "by placement")
	b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, found[0].ID)).To(Succeed())
	b.Expect(b.device(0).State.Instances).To(ContainElement(kept))
}

func everyPlacement(b bench) {
	uuid := b.migOn()
	for _, p := range b.device(0).Profiles {
		for _, start := range p.Starts {
			b.Expect(b.create(uuid, p.Name, start, p.Size)).To(Succeed(), "%s at %d", p.Name, start)
			i := b.device(0).State.Instances[0]
			b.Expect(i.Profile).To(Equal(p.Name))
			b.Expect(b.Hardware.DestroyInstance(b.Context(), uuid, i.ID)).To(Succeed())
		}
	}
}
