// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig_test

import (
	"fmt"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestParseName(t *testing.T) {
	for text, want := range map[string]mig.Name{
		"1g":                 {Slices: 1},
		"1g+me":              {Slices: 1, With: []string{"me"}},
		"1g-me":              {Slices: 1, Without: []string{"me"}},
		"3g.20gb":            {Slices: 3, MemoryGB: 20},
		"7g.141gb":           {Slices: 7, MemoryGB: 141},
		"1g.10gb+me":         {Slices: 1, MemoryGB: 10, With: []string{"me"}},
		"1g.24gb+me.all":     {Slices: 1, MemoryGB: 24, With: []string{"me.all"}},
		"1g.24gb-me":         {Slices: 1, MemoryGB: 24, Without: []string{"me"}},
		"4g.96gb+gfx":        {Slices: 4, MemoryGB: 96, With: []string{"gfx"}},
		"1g.24gb+gfx,me-x.y": {Slices: 1, MemoryGB: 24, With: []string{"gfx", "me"}, Without: []string{"x.y"}},
		"1c.3g.20gb":         {Compute: 1, Slices: 3, MemoryGB: 20},
		"12g.192gb":          {Slices: 12, MemoryGB: 192},
	} {
		t.Run(text, func(t *testing.T) {
			g := NewWithT(t)
			n, err := mig.ParseName(text)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(n).To(Equal(want))
			g.Expect(spelled(n)).To(Equal(text))
		})
	}
}

func TestParseNameRefuses(t *testing.T) {
	for _, text := range []string{
		"", "g", "0g", "1", "1G", "1g.", "1g.0gb", "1g.5g", "1g.5GB", "1g5gb", " 1g", "1g ", "-1g", "1g+", "1g-", "1g++me",
		"1g.5gb-me+gfx", "1g,me", "1g.5gb.me", "c.1g.5gb", "0c.1g.5gb", "100g", "1g.10000gb", "all", "1g.5gb\n",
	} {
		_, err := mig.ParseName(text)
		NewWithT(t).Expect(err).To(MatchError(ContainSubstring("is not the name of a MIG profile")), text)
	}
	_, err := mig.ParseName("4c.3g.20gb")
	NewWithT(t).Expect(err).To(MatchError(`"4c.3g.20gb" names a compute instance larger than its GPU instance`))
}

func TestACompleteComputeInstanceIsNotNamed(t *testing.T) {
	n, err := mig.ParseName("3c.3g.20gb")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(spelled(n)).To(Equal("3g.20gb"))
}

func TestEveryNameOfTheTableIsOfTheGrammar(t *testing.T) {
	for _, m := range withMIG(t) {
		spec, err := sim.SpecOf(m)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		for _, p := range spec.Profiles {
			n, err := mig.ParseName(p.Name)
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Expect(spelled(n)).To(Equal(p.Name))
			NewWithT(t).Expect(n.Slices).To(Equal(p.Slices), p.Name)
		}
	}
}

func FuzzParseName(f *testing.F) {
	for _, s := range []string{"1g", "1c.2g.10gb", "1g.24gb+gfx,me-me.all", "3g.20gb"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := mig.ParseName(s)
		if err != nil {
			return
		}
		again, err := mig.ParseName(spelled(n))
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		NewWithT(t).Expect(again).To(Equal(n))
	})
}

// spelled is a name as NVIDIA's tools write it.
func spelled(n mig.Name) string {
	var b strings.Builder
	if n.Compute != 0 {
		fmt.Fprintf(&b, "%dc.", n.Compute)
	}
	fmt.Fprintf(&b, "%dg", n.Slices)
	if n.MemoryGB != 0 {
		fmt.Fprintf(&b, ".%dgb", n.MemoryGB)
	}
	if len(n.With) > 0 {
		b.WriteString("+" + strings.Join(n.With, ","))
	}
	if len(n.Without) > 0 {
		b.WriteString("-" + strings.Join(n.Without, ","))
	}
	return b.String()
}
