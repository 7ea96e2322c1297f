// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"testing"

	drivers "github.com/gpusharing/gpu-sharing-operator/internal/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// BenchmarkObserve reads a node of 8 GPUs in 7 instances each over the simulated driver.
func BenchmarkObserve(b *testing.B) {
	d, err := root()
	if err != nil {
		b.Fatal(err)
	}
	spec := simdriver.Times("bench", sim.A100, 8)
	if err := d.Replace(spec); err != nil {
		b.Fatal(err)
	}
	err = d.Update(func(s *simdriver.State) error {
		for i := range s.Node.GPUs {
			uuid := s.Node.GPUs[i].UUID
			if _, err := s.Node.SetMIG(uuid, true, 0); err != nil {
				return err
			}
			for range 7 {
				g, err := s.Node.CreateGPUInstance(uuid, 19, nil)
				if err != nil {
					return err
				}
				if _, err := s.Node.CreateComputeInstance(uuid, g.ID, 1); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	library, err := drivers.Node{Host: "/"}.Library(d.Root())
	if err != nil {
		b.Fatal(err)
	}
	h := nvml.New(nvml.Options{Library: library})
	for b.Loop() {
		if _, err := h.Observe(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
