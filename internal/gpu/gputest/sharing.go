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
