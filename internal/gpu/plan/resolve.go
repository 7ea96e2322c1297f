// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Resolve reduces a policy's sharing to the normal form for the selected GPUs of one node, with the exact profile names
// of each GPU. The sharing is one that the API admits. Resolve knows the selected GPUs only: how they go together with
// the others of the node is for its caller to say. Errors: *Problem.
func Resolve(s v1alpha1.Sharing, selected []gpu.Device) ([]v1alpha1.DeviceSpec, error) {
	if len(selected) == 0 {
		return nil, nil
	}
	switch s.Strategy {
	case v1alpha1.StrategyExclusive:
		return wholeGPUs(selected), nil
	case v1alpha1.StrategyTimeSlicing:
		return resolveTimeSlicing(*s.TimeSlicing, selected)
	case v1alpha1.StrategyMPS:
		return resolveMPS(s, selected)
	case v1alpha1.StrategyMIG:
		return resolveMIG(*s.MIG, selected)
	}
	return wholeGPUs(selected), nil
}

// wholeGPUs is how GPUs are that nothing divides.
func wholeGPUs(selected []gpu.Device) []v1alpha1.DeviceSpec {
	specs := make([]v1alpha1.DeviceSpec, 0, len(selected))
	for _, d := range selected {
		specs = append(specs, v1alpha1.DeviceSpec{
			UUID:    d.UUID,
			Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
		})
	}
	return specs
}

// virtual refuses what a vGPU cannot do.
func virtual(d gpu.Device) error {
	if !d.Virtual {
		return nil
	}
	return problem(v1alpha1.ReasonVirtualGPUNotSupported, "%s is a virtual GPU, which cannot be shared further; leave its node or GPU "+
		"out of the policy, or use strategy Exclusive there", d)
}
