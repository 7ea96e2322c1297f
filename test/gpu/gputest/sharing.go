// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func sharing() map[string]contractCase {
	return map[string]contractCase{
		"sets the compute mode":                             {models: []string{t4, t4}, changes: true, check: computeMode},
		"has no compute mode but the default in MIG mode":   {models: []string{h100}, changes: true, check: computeModeInMIG},
		"goes back to the default compute mode with MIG":    {models: []string{h100}, changes: true, check: migEndsComputeMode},
		"goes back to the default compute mode with a boot": {models: []string{t4}, changes: true, check: bootEndsComputeMode},
		"sets the time slice while the GPU is used":         {models: []string{t4, t4}, changes: true, check: timeSlice},
		"has no time slice in MIG mode":                     {models: []string{h100}, changes: true, check: timeSliceInMIG},
		"has no time slice on a virtual GPU":                {models: []string{vgpu}, changes: true, check: timeSliceOfVGPU},
		"goes back to the default time slice with a reset":  {models: []string{a100}, changes: true, check: resetEndsTimeSlice},
		"goes back to the default time slice with a boot":   {models: []string{t4}, changes: true, check: bootEndsTimeSlice},
	}
}

func computeMode(b bench) {
	uuid := b.uuid()
	for _, mode := range []gpu.ComputeMode{
		gpu.ComputeExclusiveProcess, gpu.ComputeExclusiveProcess, gpu.ComputeProhibited, gpu.ComputeDefault,
	} {
		b.Expect(b.Hardware.SetComputeMode(b.Context(), uuid, mode)).To(Succeed())
		b.Expect(b.device(0).State.ComputeMode).To(Equal(mode))
		b.Expect(b.device(1).State.ComputeMode).To(Equal(gpu.ComputeDefault))
	}
}

func computeModeInMIG(b bench) {
	uuid := b.migOn()
	b.Expect(b.Hardware.SetComputeMode(b.Context(), uuid, gpu.ComputeDefault)).To(Succeed(), "it is so already")
	b.Expect(b.Hardware.SetComputeMode(b.Context(), uuid, gpu.ComputeExclusiveProcess)).To(MatchError(gpu.ErrNotSupported))
}

func migEndsComputeMode(b bench) {
	b.Expect(b.Hardware.SetComputeMode(b.Context(), b.uuid(), gpu.ComputeExclusiveProcess)).To(Succeed())
	b.migOn()
	b.Expect(b.device(0).State.ComputeMode).To(Equal(gpu.ComputeDefault))
}

func bootEndsComputeMode(b bench) {
	b.Expect(b.Hardware.SetComputeMode(b.Context(), b.uuid(), gpu.ComputeExclusiveProcess)).To(Succeed())
	b.Rig.Reboot()
	b.Expect(b.device(0).State.ComputeMode).To(Equal(gpu.ComputeDefault))
}

func (b bench) timeSlices(indexes ...int) []gpu.TimeSlice {
	b.Helper()
	var uuids []string
	for _, index := range indexes {
		uuids = append(uuids, b.device(index).UUID)
	}
	found, err := b.Hardware.TimeSlices(b.Context(), uuids...)
	b.Expect(err).NotTo(HaveOccurred())
	b.Expect(found).To(HaveLen(len(uuids)))
	var list []gpu.TimeSlice
	for _, uuid := range uuids {
		list = append(list, found[uuid])
	}
	return list
}

func timeSlice(b bench) {
	uuid := b.uuid()
	b.Expect(b.timeSlices(0, 1)).To(Equal([]gpu.TimeSlice{gpu.TimeSliceDefault, gpu.TimeSliceDefault}))
	b.Rig.AddProcess(uuid, gpu.Process{PID: 900003, Name: "python3", Instance: gpu.WholeGPU})
	for _, slice := range []gpu.TimeSlice{gpu.TimeSliceShort, gpu.TimeSliceMedium, gpu.TimeSliceLong, gpu.TimeSliceLong, gpu.TimeSliceDefault} {
		b.Expect(b.Hardware.SetTimeSlice(b.Context(), uuid, slice)).To(Succeed())
		b.Expect(b.timeSlices(0, 1)).To(Equal([]gpu.TimeSlice{slice, gpu.TimeSliceDefault}))
	}
	b.Expect(b.device(0).Processes).To(HaveLen(1))
	b.Expect(b.Hardware.SetTimeSlice(b.Context(), uuid, "Longer")).NotTo(Succeed())
	b.Expect(b.Hardware.SetTimeSlice(b.Context(), "GPU-00000000-0000-0000-0000-000000000000", gpu.TimeSliceLong)).To(MatchError(gpu.ErrGone))
}

func timeSliceInMIG(b bench) {
	uuid := b.migOn()
	b.Expect(b.timeSlices(0)).To(Equal([]gpu.TimeSlice{gpu.TimeSliceNone}))
	b.Expect(b.Hardware.SetTimeSlice(b.Context(), uuid, gpu.TimeSliceShort)).To(MatchError(gpu.ErrNotSupported))
}

func timeSliceOfVGPU(b bench) {
	b.Expect(b.timeSlices(0)).To(Equal([]gpu.TimeSlice{gpu.TimeSliceNone}))
	b.Expect(b.Hardware.SetTimeSlice(b.Context(), b.uuid(), gpu.TimeSliceShort)).To(MatchError(gpu.ErrNotSupported))
}

func resetEndsTimeSlice(b bench) {
	uuid := b.uuid()
	b.Expect(b.Hardware.SetTimeSlice(b.Context(), uuid, gpu.TimeSliceShort)).To(Succeed())
	b.Expect(b.Hardware.Reset(b.Context(), uuid)).To(Succeed())
	b.Expect(b.timeSlices(0)).To(Equal([]gpu.TimeSlice{gpu.TimeSliceDefault}))
}

func bootEndsTimeSlice(b bench) {
	b.Expect(b.Hardware.SetTimeSlice(b.Context(), b.uuid(), gpu.TimeSliceShort)).To(Succeed())
	b.Rig.Reboot()
	b.Expect(b.timeSlices(0)).To(Equal([]gpu.TimeSlice{gpu.TimeSliceDefault}))
}
