// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func placements(l []gpu.Instance) string {
	var parts []string
	for _, i := range l {
		parts = append(parts, fmt.Sprint(i.Profile, "@", i.Placement))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// TestBesideFindsAllThatTheHardwareHolds compares it with the simulated hardware: beside each layout, of which every
// other instance stays and the others may go, all larger layouts are found, once.
func TestBesideFindsAllThatTheHardwareHolds(t *testing.T) {
	for _, m := range []sim.Model{sim.A30, sim.A100} {
		o := newOracle(t, m)
		var profiles []string
		for _, p := range o.device.Profiles {
			profiles = append(profiles, p.Name)
		}
		for n := 0; n < len(o.all); n += 1 + len(o.all)/40 {
			var stay, mayGo []gpu.Instance
			for k, i := range o.all[n].instances {
				if k%2 == 0 {
					stay = append(stay, i)
				} else {
					mayGo = append(mayGo, i)
				}
			}
			found := map[string]int{}
			err := mig.Beside(o.device, stay, mayGo, profiles, func(further []gpu.Instance) {
				found[placements(append(slices.Clone(stay), further...))]++
			})
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			want := map[string]int{}
			for _, l := range o.all {
				if all := placements(l.instances); containsAll(l.instances, stay) {
					want[all] = 1
				}
			}
			NewWithT(t).Expect(found).To(Equal(want), "beside %s", placements(stay))
		}
	}
}

func containsAll(l, part []gpu.Instance) bool {
	for _, p := range part {
		if !slices.ContainsFunc(l, func(i gpu.Instance) bool { return i.Profile == p.Profile && i.Placement == p.Placement }) {
			return false
		}
	}
	return true
}

func TestBesideNamesAnUnknownProfile(t *testing.T) {
	o := newOracle(t, sim.A30)
	err := mig.Beside(o.device, nil, nil, []string{"3g.20gb"}, func([]gpu.Instance) {})
	NewWithT(t).Expect(err).To(MatchError(ContainSubstring("3g.20gb")))
}

func TestFragmentationIsWhatProfilesCannotUse(t *testing.T) {
	g := NewWithT(t)
	d := newOracle(t, sim.A100).device
	at := func(start, size int) gpu.Placement { return gpu.Placement{Start: start, Size: size} }
	profiles := []string{"1g.5gb", "3g.20gb", "7g.40gb"}
	g.Expect(mig.Fragmentation(d, nil, profiles)).To(Equal(1)) // 7 × 1g of 8 slices
	// One 1g at the start leaves seven slices: six for 1g, four for one 3g, none for 7g.
	g.Expect(mig.Fragmentation(d, []gpu.Instance{{Profile: "1g.5gb", Placement: at(0, 1)}}, profiles)).To(Equal(1 + 3 + 7))
	g.Expect(mig.Fragmentation(d, []gpu.Instance{{Profile: "1g.5gb", Placement: at(6, 1)}}, profiles)).To(Equal(1 + 3 + 7))
	g.Expect(mig.Fragmentation(d, []gpu.Instance{{Profile: "7g.40gb", Placement: at(0, 8)}}, profiles)).To(BeZero())
}
