// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

func using(pod string, used, share int64, compute float64) usage.Container {
	c := usage.Container{
		Name: usage.Name{Namespace: "team", Pod: pod, Container: "main"}, MemoryBytes: new(used << 30), ShareBytes: new(share << 30), Processes: 1,
	}
	if compute > 0 {
		c.Utilization = &gpu.Utilization{Compute: compute}
	}
	return c
}

// measuredFleet has each strategy, a container over its share, values that no driver reports, and nodes that were not
// measured.
func measuredFleet() []measuredNode {
	slicing := usage.Unit{
		GPU: "GPU-1", Product: "NVIDIA-A100-SXM4-40GB", Strategy: v1alpha1.StrategyTimeSlicing, Replicas: 4,
		Memory: &gpu.Memory{Total: 40 << 30, Used: 30 << 30, Free: 10 << 30}, Utilization: &gpu.Utilization{Compute: 0.97},
		Containers: []usage.Container{using("greedy-7c9d", 17, 10, 0.75), using("modest-0", 9, 10, 0.2), using("idle-0", 0, 10, 0)},
		OtherBytes: 4 << 30,
	}
	mps := usage.Unit{
		GPU: "GPU-2", Index: 1, Product: "NVIDIA-H100-80GB-HBM3", Strategy: v1alpha1.StrategyMPS, Replicas: 8,
		Limits: &usage.Limits{ActiveThreads: 0.125, MemoryBytes: new(int64(10 << 30))}, Utilization: &gpu.Utilization{Compute: 0.4},
		Memory: &gpu.Memory{Total: 80 << 30, Used: 8 << 30}, Containers: []usage.Container{using("server-0", 8, 10, 0)},
	}
	whole := usage.Unit{
		GPU: "GPU-3", Product: "NVIDIA-A100-SXM4-40GB", Strategy: v1alpha1.StrategyMIG, Partitioned: true,
		Memory: &gpu.Memory{Total: 40 << 30, Used: 4 << 30},
	}
	small := usage.Unit{
		GPU: "GPU-3", Instance: new(9), Profile: "1g.5gb", Strategy: v1alpha1.StrategyMIG, Replicas: 1,
		Memory: &gpu.Memory{Total: 5 << 30, Used: 4 << 30}, Containers: []usage.Container{using("notebook-0", 4, 5, 0)},
	}
	free := usage.Unit{
		GPU: "GPU-3", Instance: new(10), Profile: "2g.10gb", Strategy: v1alpha1.StrategyMIG, Replicas: 2, Memory: &gpu.Memory{Total: 10 << 30},
	}
	unreported := using("python-0", 2, 1, 0)
	unreported.ShareBytes = nil
	return []measuredNode{
		{name: "a", report: usage.Report{Node: "a", Policy: "research", Units: []usage.Unit{slicing, mps}, Daemons: []usage.Daemon{
			{Resource: "nvidia.com/gpu", Clients: 3, OutdatedClients: 2},
		}}},
		{name: "b", report: usage.Report{Node: "b", Policy: "notebooks", Units: []usage.Unit{whole, small, free}}},
		{name: "c", report: usage.Report{Node: "c", Incomplete: "sampling GPU 1: nvmlDeviceGetHandleByIndex: ERROR_GPU_IS_LOST: not found", Units: []usage.Unit{
			{GPU: "GPU-4", Product: "NVIDIA-GB10", Strategy: v1alpha1.StrategyExclusive, Replicas: 1, Containers: []usage.Container{unreported}},
		}}},
		{name: "d", failed: "pod gpu-sharing-operator/gpu-sharing-agent-x: 503: waiting for the agent to have finished with the GPUs"},
	}
}

// TestTop compares what top prints with testdata/top-*.golden.
func TestTop(t *testing.T) {
	for title, tc := range map[string]struct {
		of   string
		only []string
	}{
		"nodes": {"node", nil}, "one node": {"node", []string{"b"}}, "policies": {"policy", nil}, "pods": {"pod", nil}, "one pod": {"pod", []string{"modest-0"}},
	} {
		t.Run(title, func(t *testing.T) {
			compare(t, "top "+title, func(shown *text) {
				chosen, err := choose(tc.of, measuredFleet(), tc.only)
				NewWithT(t).Expect(err).NotTo(HaveOccurred())
				shown.top(tc.of, chosen)
			})
		})
	}
}

func TestTopNamesWhatItDoesNotKnow(t *testing.T) {
	for of, name := range map[string]string{"node": "z", "policy": "z", "pod": "z"} {
		_, err := choose(of, measuredFleet(), []string{name})
		NewWithT(t).Expect(err).To(MatchError(ContainSubstring("no GPU is measured for " + of + ` "z"`)))
	}
}

func TestABarShowsThatSomethingIsUsed(t *testing.T) {
	g := NewWithT(t)
	g.Expect(bar(&gpu.Memory{Total: 1000 << 30, Used: 1 << 30}, 10)).To(HavePrefix("[#.........]"))
	g.Expect(bar(&gpu.Memory{Total: 10 << 30}, 10)).To(HavePrefix("[..........]"))
	g.Expect(bar(&gpu.Memory{Total: 10 << 30, Used: 11 << 30}, 10)).To(HavePrefix("[##########]"))
	g.Expect(bar(nil, 10)).To(Equal("memory is not reported by the driver"))
}
