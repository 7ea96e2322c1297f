// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import "github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"

func held(name string, pods ...string) dashboard.Block {
	return dashboard.Block{Size: 1, Name: name, Holders: pods}
}

func uses(name string, used, share int64, compute float64) dashboard.Container {
	c := dashboard.Container{Name: name + " main", UsedBytes: new(used * gib / 10), ShareBytes: new(share * gib / 10), Over: used > share}
	if compute > 0 {
		c.Utilization = &compute
	}
	return c
}

func count(name string, now, then int64) dashboard.Resource {
	r := dashboard.Resource{Name: name, Now: &now}
	if then != now {
		r.Then = &then
	}
	return r
}

func instance(profile string, size int, used, total int64, pods ...string) dashboard.Block {
	b := dashboard.Block{Size: size, Name: profile, Holders: pods}
	if total > 0 {
		b.Memory = &dashboard.Memory{Used: used * gib / 10, Total: total * gib / 10}
	}
	return b
}

// shown is a small cluster with each strategy, for the picture of the docs.
func shown() dashboard.Page {
	const a100, h100, t4 = "NVIDIA-A100-SXM4-40GB", "NVIDIA-H100-80GB-HBM3", "Tesla-T4"
	return dashboard.Page{
		Cluster: "research (https://cluster.example.com:6443)", Notes: []string{},
		Policies: []dashboard.Policy{
			{Name: "inference", Strategy: "MPS", Matched: 1, Ready: 1, Updated: 1, State: "Ready", Tone: dashboard.ToneReady},
			{Name: "notebooks", Strategy: "TimeSlicing", Matched: 1, Ready: 1, Updated: 1, State: "Ready", Tone: dashboard.ToneReady},
			{
				Name: "training", Strategy: "MIG", Matched: 2, Ready: 1, Updated: 1, Blocked: 1, State: "GPUInUse", Tone: dashboard.ToneBlocked,
				Message: "1 of 2 nodes is not ready: gpu-a100-b waits for pod ml/finetune-0",
			},
		},
		Nodes: []dashboard.Node{
			{
				Name: "gpu-a100-a", Policy: "training", State: "Ready", Tone: dashboard.ToneReady, Products: []string{a100}, Namespaces: []string{"ml", "vision"},
				Resources: []dashboard.Resource{count("nvidia.com/mig-1g.5gb", 1, 1), count("nvidia.com/mig-2g.10gb", 1, 1), count("nvidia.com/mig-3g.20gb", 1, 1)},
				GPUs: []dashboard.GPU{{
					UUID: "GPU-a", Product: a100, Sharing: "MIG", MemoryBytes: 40 * gib, Memory: &dashboard.Memory{Used: 29 * gib, Total: 40 * gib},
					Drawing: dashboard.Drawing{Slices: 8, Blocks: []dashboard.Block{
						instance("3g.20gb", 4, 184, 195, "ml/train-resnet-0"), instance("2g.10gb", 2, 62, 97, "vision/labels-7c9d"),
						instance("1g.5gb", 1, 41, 47, "ml/notebook-0"),
						{Size: 1},
					}},
					Containers: []dashboard.Container{uses("ml/train-resnet-0", 184, 195, 0), uses("vision/labels-7c9d", 62, 97, 0), uses("ml/notebook-0", 41, 47, 0)},
				}},
			},
			{
				Name: "gpu-a100-b", Policy: "training", State: "GPUInUse (Draining)", Tone: dashboard.ToneBlocked, Products: []string{a100}, Namespaces: []string{"ml"},
				Message:   "Waiting until 14:20 for pods that use GPU 0 (rollout.drain)",
				Blockers:  []string{"pod ml/finetune-0 uses GPU 0: is waited for, up to 10m0s (rollout.drain)"},
				Resources: []dashboard.Resource{count("nvidia.com/gpu", 1, 0), count("nvidia.com/mig-1g.5gb", 0, 1), count("nvidia.com/mig-2g.10gb", 0, 1), count("nvidia.com/mig-3g.20gb", 0, 1)},
				GPUs: []dashboard.GPU{{
					UUID: "GPU-b", Product: a100, Sharing: "not shared", MemoryBytes: 40 * gib, Memory: &dashboard.Memory{Used: 22 * gib, Total: 40 * gib},
					Utilization: new(0.64), Drawing: dashboard.Drawing{Slices: 8, Blocks: []dashboard.Block{{Size: 8, Name: "whole GPU", Holders: []string{"ml/finetune-0"}}}},
					Containers: []dashboard.Container{uses("ml/finetune-0", 220, 400, 0.64)},
				}},
			},
			{
				Name: "gpu-h100", Policy: "inference", State: "Ready", Tone: dashboard.ToneReady, Products: []string{h100}, Namespaces: []string{"serving"},
				Resources: []dashboard.Resource{count("nvidia.com/gpu.shared", 8, 8)},
				GPUs: []dashboard.GPU{{
					UUID: "GPU-c", Product: h100, Sharing: "MPS, 12% of the threads and 10195 MiB for each client, 8 replicas", MemoryBytes: 80 * gib,
					Memory: &dashboard.Memory{Used: 31 * gib, Total: 80 * gib}, Utilization: new(0.57),
					Drawing: dashboard.Drawing{Slices: 8, Blocks: []dashboard.Block{
						held("replica", "serving/llm-0"), held("replica", "serving/llm-1"), held("replica", "serving/asr-0"), {Size: 5, Name: "5 replicas"},
					}},
					Containers: []dashboard.Container{uses("serving/llm-0", 99, 100, 0), uses("serving/llm-1", 98, 100, 0), uses("serving/asr-0", 71, 100, 0)},
				}},
			},
			{
				Name: "gpu-t4", Policy: "notebooks", State: "Ready", Tone: dashboard.ToneReady, Products: []string{t4}, Namespaces: []string{"team"},
				Resources: []dashboard.Resource{count("nvidia.com/gpu", 4, 4)},
				GPUs: []dashboard.GPU{{
					UUID: "GPU-d", Product: t4, Sharing: "TimeSlicing, 4 replicas", MemoryBytes: 15 * gib, Memory: &dashboard.Memory{Used: 148 * gib / 10, Total: 15 * gib},
					Utilization: new(0.97), Drawing: dashboard.Drawing{Slices: 4, Blocks: []dashboard.Block{
						held("replica", "team/greedy-7c9d"), held("replica", "team/idle-0"), held("replica", "team/modest-0"), {Size: 1, Name: "1 replica"},
					}},
					Containers: []dashboard.Container{uses("team/greedy-7c9d", 91, 38, 0.75), uses("team/modest-0", 36, 38, 0.2), uses("team/idle-0", 0, 38, 0)},
				}},
			},
		},
	}
}
