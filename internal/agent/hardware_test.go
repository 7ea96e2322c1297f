// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"errors"
	"testing"

	"github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/host"
	hostfake "github.com/gpusharing/gpu-sharing-operator/internal/host/fake"
)

func TestLate(t *testing.T) {
	g := gomega.NewWithT(t)
	missing, opened := errors.New("no libnvidia-ml.so.1 below /run/nvidia/driver"), 0
	var there gpu.Hardware
	late := agent.NewLate(func() (gpu.Hardware, error) {
		if there == nil {
			return nil, missing
		}
		opened++
		return there, nil
	})
	_, err := late.Observe(t.Context())
	g.Expect(err).To(gomega.MatchError(missing))
	g.Expect(late.SetMIG(t.Context(), "GPU-1", true)).To(gomega.MatchError(missing))
	g.Expect(late.Close()).To(gomega.Succeed(), "what was never opened needs no closing")

	hardware := sim.New(sim.A100)
	there = hardware
	inventory, err := late.Observe(t.Context())
	g.Expect(err).NotTo(gomega.HaveOccurred())
	uuid := inventory.Devices[0].UUID
	g.Expect(late.SetMIG(t.Context(), uuid, true)).To(gomega.Succeed())
	g.Expect(late.CreateInstance(t.Context(), uuid, "7g.40gb", gpu.Placement{Size: 8})).To(gomega.Succeed())
	inventory, err = late.Observe(t.Context())
	g.Expect(err).NotTo(gomega.HaveOccurred())
	g.Expect(late.DestroyInstance(t.Context(), uuid, inventory.Devices[0].State.Instances[0].ID)).To(gomega.Succeed())
	g.Expect(late.SetMIG(t.Context(), uuid, false)).To(gomega.Succeed())
	g.Expect(late.SetComputeMode(t.Context(), uuid, gpu.ComputeExclusiveProcess)).To(gomega.Succeed())
	g.Expect(late.Reset(t.Context(), uuid)).To(gomega.Succeed())
	g.Expect(late.Close()).To(gomega.Succeed())
	g.Expect(hardware.Writes()).To(gomega.HaveLen(6), "each call arrives once")
	g.Expect(opened).To(gomega.Equal(1))
}

func TestSMI(t *testing.T) {
	g := gomega.NewWithT(t)
	var result error
	runner := hostfake.NewRunner().Add("nvidia-smi", func(context.Context, host.Command) (string, error) { return "", result })
	smi := agent.SMI(runner, "/run/nvidia/driver")

	_, err := smi(t.Context(), "--gpu-reset", "-i", "0000:07:00.0")
	g.Expect(err).NotTo(gomega.HaveOccurred())
	g.Expect(runner.Lines()).To(gomega.Equal([]string{"nvidia-smi --gpu-reset -i 0000:07:00.0"}))
	g.Expect(runner.Commands()[0].Path).To(gomega.Equal("/run/nvidia/driver/usr/bin/nvidia-smi"))
	g.Expect(runner.Commands()[0].Env).To(gomega.ContainElement(gomega.MatchRegexp("^LD_LIBRARY_PATH=.*:/run/nvidia/driver/usr/lib64:")))

	result = errors.New("exit status 255: GPU 00000000:07:00.0: In use by another client")
	_, err = smi(t.Context(), "--gpu-reset", "-i", "0000:07:00.0")
	g.Expect(err).To(gomega.MatchError(
		"running nvidia-smi: exit status 255: GPU 00000000:07:00.0: In use by another client"))
}
