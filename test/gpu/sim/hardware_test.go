// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"errors"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestHardwareRecordsWhatChanges(t *testing.T) {
	g := NewWithT(t)
	h := sim.New(sim.A100)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	uuid := inv.Devices[0].UUID
	g.Expect(h.SetMIG(t.Context(), uuid, true)).To(Succeed())
	g.Expect(h.CreateInstance(t.Context(), uuid, "3g.20gb", gpu.Placement{Start: 4, Size: 4})).To(Succeed())
	g.Expect(h.DestroyInstance(t.Context(), uuid, 2)).To(Succeed())
	g.Expect(h.Writes()).To(Equal([]string{
		"SetMIG " + uuid + " true", "CreateInstance " + uuid + " 3g.20gb at 4:4", "DestroyInstance " + uuid + " 2",
	}))
}

func TestAFailedComputeInstanceTakesTheGPUInstanceBack(t *testing.T) {
	g := NewWithT(t)
	h := sim.New(sim.H100)
	inv, _ := h.Observe(t.Context())
	uuid := inv.Devices[0].UUID
	g.Expect(h.SetMIG(t.Context(), uuid, true)).To(Succeed())
	broken := errors.New("broken")
	h.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpCreateComputeInstance {
			return broken
		}
		return nil
	}
	g.Expect(h.CreateInstance(t.Context(), uuid, "1g.10gb", gpu.Placement{Start: 0, Size: 1})).To(MatchError(broken))
	inv, _ = h.Observe(t.Context())
	g.Expect(inv.Devices[0].State.Instances).To(BeEmpty())
}

func TestACrashLeavesAPartialInstance(t *testing.T) {
	g := NewWithT(t)
	h := sim.New(sim.H100)
	inv, _ := h.Observe(t.Context())
	uuid := inv.Devices[0].UUID
	g.Expect(h.SetMIG(t.Context(), uuid, true)).To(Succeed())
	h.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpCreateComputeInstance {
			return sim.ErrCrash
		}
		return nil
	}
	at := gpu.Placement{Start: 0, Size: 1}
	g.Expect(h.CreateInstance(t.Context(), uuid, "1g.10gb", at)).To(MatchError(sim.ErrCrash))
	inv, _ = h.Observe(t.Context())
	g.Expect(inv.Devices[0].State.Instances).To(Equal([]gpu.Instance{{Profile: "1g.10gb", Placement: at, ID: 7, Partial: true}}))
}
