// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestUnusedSlices(t *testing.T) {
	for name, test := range map[string]struct {
		model     sim.Model
		instances []v1alpha1.InstanceCount
		want      plan.Slices
	}{
		"nothing created":              {sim.A100, nil, plan.Slices{Compute: 7, Memory: 8}},
		"seven of the smallest":        {sim.A100, counts("1g.5gb", 7), plan.Slices{Memory: 1}},
		"two halves":                   {sim.A100, counts("3g.20gb", 2), plan.Slices{Compute: 1}},
		"the layout of the CERN slide": {sim.A100, counts("3g.20gb", 1, "2g.10gb", 2), plan.Slices{}},
		"the whole GPU":                {sim.A100, counts("7g.40gb", 1), plan.Slices{}},
		"three of 2g":                  {sim.A100, counts("2g.10gb", 3), plan.Slices{Compute: 1, Memory: 2}},
		"with media engines":           {sim.A100, counts("1g.5gb+me", 1), plan.Slices{Compute: 6, Memory: 7}},
		"one of four":                  {sim.A30, counts("1g.6gb", 3), plan.Slices{Compute: 1, Memory: 1}},
		"no MIG":                       {sim.T4, nil, plan.Slices{}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			d := deviceOf(t, test.model)
			var instances []gpu.Instance
			if len(test.instances) > 0 {
				state, err := plan.Want(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: test.instances}, d)
				g.Expect(err).NotTo(HaveOccurred())
				instances = state.Instances
			}
			g.Expect(plan.Unused(d, instances)).To(Equal(test.want))
		})
	}
}

// deviceOf is a simulated GPU as it is found.
func deviceOf(t *testing.T, model sim.Model) gpu.Device {
	t.Helper()
	n, err := sim.NewNode("a", model)
	if err != nil {
		t.Fatal(err)
	}
	inventory, err := sim.On(n).Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return inventory.Devices[0]
}

// counts lists profiles, each with its number.
func counts(pairs ...any) []v1alpha1.InstanceCount {
	var all []v1alpha1.InstanceCount
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, v1alpha1.InstanceCount{Profile: pairs[i].(string), Count: int32(pairs[i+1].(int))})
	}
	return all
}
