// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"testing"

	. "github.com/onsi/gomega"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
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

func TestWhatTheDriverPrepares(t *testing.T) {
	g := NewWithT(t)
	k := &kubelet{publisher: publisher{shares: 1}, prepared: map[types.UID]preparedClaim{"other": {holds: []string{"gpu-0"}}}}
	there := devicesOf([]gpu.Device{
		{UUID: "a"}, {UUID: "b", Minor: 1, State: gpu.State{MIG: true, Instances: []gpu.Instance{{Profile: "1g.5gb", UUID: "m"}}}}, {UUID: "c", Minor: 2},
	}, 1)
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim"}}
	prepares := func(device string, admin bool) error {
		return k.prepareDevice(claim, resourcev1.DeviceRequestAllocationResult{Driver: draDriver, Device: device, AdminAccess: &admin}, there)
	}
	g.Expect(prepares("gpu-2", false)).To(Succeed())
	g.Expect(prepares("gpu-3", false)).To(MatchError("device gpu-3 does not exist"))
	g.Expect(prepares("gpu-0", false)).To(MatchError(ContainSubstring("already allocated to a different claim")))
	g.Expect(prepares("gpu-0", true)).To(Succeed())
	g.Expect(prepares("gpu-1-mig-1g5gb--1-0", true)).To(MatchError(ContainSubstring("admin access on a non-full-GPU device")))
	k.publisher.shares = 2
	g.Expect(prepares("gpu-0", false)).To(Succeed())
}
