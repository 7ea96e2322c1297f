// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func TestWhateverFormItHasTheListOfNvidiaSMIIsRead(t *testing.T) {
	for said, slice := range map[string]gpu.TimeSlice{
		"| GPU compute policies: |\n|   0     Timeslice     Medium    |": gpu.TimeSliceMedium,
		"GPU 00000000:07:00.0\n    Timeslice : Default":                  gpu.TimeSliceDefault,
		"GPU  0: timeslice = SHORT":                                      gpu.TimeSliceShort,
		"0, Long":                                                        gpu.TimeSliceLong,
		"|   0     Timeslice     N/A  |":                                 gpu.TimeSliceNone,
		"Timeslice: Long\nDefault: Short":                                gpu.TimeSliceNone,
		"Along 0":                                                        gpu.TimeSliceNone,
		"":                                                               gpu.TimeSliceNone,
	} {
		NewWithT(t).Expect(timeSliceIn(said)).To(Equal(slice), said)
	}
}

func TestWithoutNvidiaSMIAGPUHasNoTimeSlice(t *testing.T) {
	g := NewWithT(t)
	h := New(Options{Library: "/nowhere/libnvidia-ml.so.1"})
	g.Expect(h.SetTimeSlice(context.Background(), "GPU-1", gpu.TimeSliceNone)).To(MatchError(gpu.ErrNotSupported))
}
