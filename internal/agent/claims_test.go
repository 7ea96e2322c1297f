// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func TestTheInstanceOfAClaimIsFoundByItsPlace(t *testing.T) {
	split := gpu.Device{
		Minor:    1,
		Profiles: []gpu.Profile{{Name: "1g.5gb", ID: 19}, {Name: "1g.5gb+me", ID: 20}, {Name: "3g.20gb", ID: 9}},
		State: gpu.State{MIG: true, Instances: []gpu.Instance{
			{ID: 7, Profile: "1g.5gb", Placement: gpu.Placement{Start: 0, Size: 1}},
			{ID: 8, Profile: "1g.5gb+me", Placement: gpu.Placement{Start: 1, Size: 1}},
			{ID: 2, Profile: "3g.20gb", Placement: gpu.Placement{Start: 4, Size: 4}},
		}},
	}
	whole, unknown := gpu.Device{Minor: 1}, split
	unknown.Minor = -1
	all := []int{gpu.WholeGPU, 7, 8, 2}
	for title, c := range map[string]struct {
		device gpu.Device
		name   string
		want   []int
	}{
		"a GPU":                                      {whole, "gpu-1", []int{gpu.WholeGPU}},
		"another GPU":                                {whole, "gpu-0", nil},
		"another GPU, whose number begins alike":     {whole, "gpu-10", nil},
		"an instance":                                {split, "gpu-1-mig-1g5gb-19-0", []int{7}},
		"an instance with a dash in its profile":     {split, "gpu-1-mig-1g5gb-me-20-1", []int{8}},
		"an instance that begins later":              {split, "gpu-1-mig-3g20gb-9-4", []int{2}},
		"an instance of another GPU":                 {split, "gpu-0-mig-1g5gb-19-0", nil},
		"an instance that is gone":                   {split, "gpu-1-mig-1g5gb-19-2", all},
		"an instance in whose place is another":      {split, "gpu-1-mig-2g10gb-14-0", all},
		"a GPU that is in MIG mode by now":           {split, "gpu-1", all},
		"a name that the driver does not have today": {split, "gpu-vfio-0", all},
		"a GPU of unknown number":                    {unknown, "gpu-0", all},
	} {
		t.Run(title, func(t *testing.T) {
			a := Allocation{Device: c.name, Claim: "ml/claim"}
			NewWithT(t).Expect(held(c.device, a)).To(Equal(c.want))
		})
	}
}
