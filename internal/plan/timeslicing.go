// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// resolveTimeSlicing leaves the GPUs whole: NVIDIA's device plugin advertises them more than once, and that is all.
func resolveTimeSlicing(selected []gpu.Device) ([]v1alpha1.DeviceSpec, error) {
	for _, d := range selected {
		if err := virtual(d); err != nil {
			return nil, err
		}
	}
	return wholeGPUs(selected), nil
}
