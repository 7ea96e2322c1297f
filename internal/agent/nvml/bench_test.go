// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	drivers "github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
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

// BenchmarkSample measures 8 GPUs with 48 containers each over the simulated driver, and closes it again, as each
// scrape of an agent does. The processor time is that of the whole process, the simulated driver's part included.
func BenchmarkSample(b *testing.B) {
	d, err := root()
	if err != nil {
		b.Fatal(err)
	}
	if err := d.Replace(simdriver.Times("bench", sim.A100, 8)); err != nil {
		b.Fatal(err)
	}
	err = d.Update(func(s *simdriver.State) error {
		pid := 1 << 20 // of no process that this machine has
		for i := range s.Node.GPUs {
			for range 48 {
				pid++
				uuid := s.Node.GPUs[i].UUID
				if err := s.Node.AddProcess(uuid, gpu.Process{PID: pid, Instance: gpu.WholeGPU}); err != nil {
					return err
				}
				use := gpu.ProcessUse{
					PID: pid, Instance: gpu.WholeGPU, MemoryBytes: new(int64(512 << 20)), Utilization: &gpu.Utilization{Compute: 0.02, Memory: 0.01},
				}
				if err := s.Node.SetUse(uuid, use); err != nil {
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
	h := nvml.New(nvml.Options{Library: library, Now: time.Now})
	before := processorTime(b)
	for b.Loop() {
		sample, err := h.Sample(b.Context())
		if err != nil || len(sample.Devices) != 8 || len(sample.Devices[7].Processes) != 48 {
			b.Fatal(len(sample.Devices), err)
		}
		if err := h.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(processorTime(b)-before)/float64(b.N), "cpu-ns/op")
}

// processorTime is what this process has used.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
