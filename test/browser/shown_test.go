// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// reported is what the controller reports of a node that it drains for a MIG layout while a pod holds a GPU: the
// picture of the docs shows no sentence that is not emitted.
func reported(t *testing.T, policy, name, namespace, pod string) (onNode v1alpha1.PendingNode, onPolicy metav1.Condition, handling string) {
	t.Helper()
	g := NewWithT(t)
	now := time.Date(2026, 11, 26, 14, 10, 0, 0, time.UTC)
	simulated, err := sim.NewNode(name, sim.A100)
	g.Expect(err).NotTo(HaveOccurred())
	inventory, err := sim.On(simulated).Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	n := cluster.Node{
		Name: name, AgentReady: true, Allocatable: map[string]int64{"nvidia.com/gpu": 1}, Labels: map[string]string{"nvidia.com/gpu.deploy.device-plugin": "true"},
		Taints: []corev1.Taint{{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule, TimeAdded: new(metav1.NewTime(now))}},
		Pods:   []cluster.Pod{{Namespace: namespace, Name: pod, UID: pod, GPU: true, Controller: "StatefulSet"}},
	}
	n.GPU.Name, n.GPU.Status.Devices = name, plan.Reported(inventory.Devices)
	n.GPU.Status.Devices[0].Holders = []v1alpha1.HolderStatus{{Namespace: namespace, PodName: pod, ContainerName: "main"}}
	p := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: policy, Generation: 1}}
	p.Spec.NodeSelector = &v1alpha1.NodeSelector{}
	p.Spec.Sharing.Strategy = v1alpha1.StrategyMIG
	p.Spec.Sharing.MIG = &v1alpha1.MIG{Layouts: []v1alpha1.MIGLayout{{Instances: []v1alpha1.MIGInstances{
		{Profile: "3g.20gb", Count: 1}, {Profile: "2g.10gb", Count: 1}, {Profile: "1g.5gb", Count: 1},
	}}}}
	p.Spec.Rollout.Drain.Mode, p.Spec.Rollout.Drain.TimeoutSeconds = v1alpha1.DrainModeWaitForIdle, 600
	d := rollout.Decide(cluster.Snapshot{
		Now: now.Add(time.Minute), Nodes: []cluster.Node{n}, Policies: []v1alpha1.GPUSharingPolicy{p}, Plugin: cluster.DevicePlugin{Ready: true, ClusterPolicy: true},
	})
	ready, _ := condition.Find(d.Policies[policy].Conditions, v1alpha1.ConditionReady)
	g.Expect(d.Policies[policy].Pending).To(HaveLen(1))
	g.Expect(d.Nodes[0].Blockers).To(HaveLen(1))
	b := d.Nodes[0].Blockers[0]
	return d.Policies[policy].Pending[0], ready, b.Name + " uses " + b.Uses + ": " + b.Handling
}

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
func shown(t *testing.T) dashboard.Page {
	t.Helper()
	waits, training, blocker := reported(t, "training", "gpu-a100-b", "ml", "finetune-0")
	const a100, h100, t4 = "NVIDIA-A100-SXM4-40GB", "NVIDIA-H100-80GB-HBM3", "Tesla-T4"
	return dashboard.Page{
		Cluster: "research (https://cluster.example.com:6443)", Notes: []string{},
		Policies: []dashboard.Policy{
			{Name: "inference", Shares: dashboard.Shares{Offered: 8, InUse: 3}, Strategy: "MPS", Matched: 1, Ready: 1, Updated: 1, State: "Ready", Tone: dashboard.ToneReady},
			{Name: "notebooks", Shares: dashboard.Shares{Offered: 4, InUse: 3}, Strategy: "TimeSlicing", Matched: 1, Ready: 1, Updated: 1, State: "Ready", Tone: dashboard.ToneReady},
			{Name: "research", Shares: dashboard.Shares{Offered: 3, InUse: 3}, Strategy: "MIG", Matched: 1, Ready: 1, Updated: 1, State: "Ready", Tone: dashboard.ToneReady},
			{Name: "training", Shares: dashboard.Shares{Offered: 1, InUse: 1}, Strategy: "MIG", Matched: 1, Blocked: 1, State: training.Reason, Tone: dashboard.ToneBlocked, Message: training.Message},
		},
		Nodes: []dashboard.Node{
			{
				Name: "gpu-a100-a", Policy: "research", State: "Ready", Tone: dashboard.ToneReady, Products: []string{a100}, Namespaces: []string{"ml", "vision"}, Shares: dashboard.Shares{Offered: 3, InUse: 3},
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
				Name: "gpu-a100-b", Policy: "training", State: waits.Reason + " (" + waits.State + ")", Tone: dashboard.ToneBlocked, Products: []string{a100}, Namespaces: []string{"ml"},
				Message: waits.Message, Blockers: []string{blocker}, Shares: dashboard.Shares{Offered: 1, InUse: 1},
				Resources: []dashboard.Resource{count("nvidia.com/gpu", 1, 0), count("nvidia.com/mig-1g.5gb", 0, 1), count("nvidia.com/mig-2g.10gb", 0, 1), count("nvidia.com/mig-3g.20gb", 0, 1)},
				GPUs: []dashboard.GPU{{
					UUID: "GPU-b", Product: a100, Sharing: "not shared", MemoryBytes: 40 * gib, Memory: &dashboard.Memory{Used: 22 * gib, Total: 40 * gib},
					Utilization: new(0.64), Drawing: dashboard.Drawing{Slices: 8, Blocks: []dashboard.Block{{Size: 8, Name: "whole GPU", Holders: []string{"ml/finetune-0"}}}},
					Containers: []dashboard.Container{uses("ml/finetune-0", 220, 400, 0.64)},
				}},
			},
			{
				Name: "gpu-h100", Policy: "inference", State: "Ready", Tone: dashboard.ToneReady, Products: []string{h100}, Namespaces: []string{"serving"}, Shares: dashboard.Shares{Offered: 8, InUse: 3},
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
				Name: "gpu-t4", Policy: "notebooks", State: "Ready", Tone: dashboard.ToneReady, Products: []string{t4}, Namespaces: []string{"team"}, Shares: dashboard.Shares{Offered: 4, InUse: 3},
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

// everyState is a page with a node in each state, one that nobody asked, and what a page cannot show.
func everyState(t *testing.T) dashboard.Page {
	t.Helper()
	p := shown(t)
	p.Notes = []string{"Memory and utilization: agents serve no metrics; install the chart with metrics.enabled=true"}
	p.Stale = &dashboard.Stale{Since: time.Now().Add(-96 * time.Second), Why: "the API server does not answer"}
	p.Policies[3].Notes = []string{"on demand: 2 pods for nvidia.com/mig-2g.10gb: 1, ml/eval-0 first: 2 would start after the change below"}
	changing, failed := p.Nodes[0], p.Nodes[0]
	changing.Name, changing.State, changing.Tone = "gpu-a100-c", "Progressing (Applying)", dashboard.ToneWorking
	changing.Steps = []string{"GPU 0 (NVIDIA-A100-SXM4-40GB): destroy 3g.20gb at 4:4", "GPU 0 (NVIDIA-A100-SXM4-40GB): create 2 × 1g.5gb"}
	failed.Name, failed.State, failed.Tone = "gpu-a100-d", "ApplyTimedOut (Failed)", dashboard.ToneFailed
	failed.Message = "The GPUs did not match the desired state within 15m0s; rolled back; retry by gpusharing.io/retry"
	p.Nodes = append(p.Nodes, changing, failed)
	return p
}
