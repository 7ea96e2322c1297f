// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"testing"

	. "github.com/onsi/gomega"
	resourcev1 "k8s.io/api/resource/v1"
)

func TestWhatADeviceTaintRuleTaints(t *testing.T) {
	d := device("gpu-0", nil)
	for name, tc := range map[string]struct {
		selector *resourcev1.DeviceTaintSelector
		effect   resourcev1.DeviceTaintEffect
		want     bool
	}{
		"a pool":                {&resourcev1.DeviceTaintSelector{Driver: new(draDriver), Pool: new("n1")}, resourcev1.DeviceTaintEffectNoSchedule, true},
		"another pool":          {&resourcev1.DeviceTaintSelector{Pool: new("n2")}, resourcev1.DeviceTaintEffectNoSchedule, false},
		"another driver":        {&resourcev1.DeviceTaintSelector{Driver: new("nic.example.com")}, resourcev1.DeviceTaintEffectNoSchedule, false},
		"one device":            {&resourcev1.DeviceTaintSelector{Device: new("gpu-0")}, resourcev1.DeviceTaintEffectNoExecute, true},
		"another device":        {&resourcev1.DeviceTaintSelector{Device: new("gpu-1")}, resourcev1.DeviceTaintEffectNoExecute, false},
		"all":                   {&resourcev1.DeviceTaintSelector{}, resourcev1.DeviceTaintEffectNoSchedule, true},
		"none: no selector":     {nil, resourcev1.DeviceTaintEffectNoSchedule, false},
		"none: a dry run":       {&resourcev1.DeviceTaintSelector{}, resourcev1.DeviceTaintEffectNone, false},
		"none: an effect to be": {&resourcev1.DeviceTaintSelector{}, "Another", false},
	} {
		t.Run(name, func(t *testing.T) {
			rule := resourcev1.DeviceTaintRule{Spec: resourcev1.DeviceTaintRuleSpec{
				DeviceSelector: tc.selector, Taint: resourcev1.DeviceTaint{Key: "k", Effect: tc.effect},
			}}
			NewWithT(t).Expect(tainted([]resourcev1.DeviceTaintRule{rule}, "n1", d)).To(Equal(tc.want))
		})
	}
	d.Taints = []resourcev1.DeviceTaint{{Key: "gpu.nvidia.com/unhealthy", Effect: resourcev1.DeviceTaintEffectNoSchedule}}
	NewWithT(t).Expect(tainted(nil, "n1", d)).To(BeTrue(), "by its driver")
}
