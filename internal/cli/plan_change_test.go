// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const mixedLayout = `{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20gb, count: 1}, {profile: 2g.10gb, count: 1}, {profile: 1g.5gb, count: 1}]}]}}}`

// governed is a node whose GPU policy research has partitioned, and that was whole before.
func governed(t *testing.T, release v1alpha1.Release) cluster.Node {
	t.Helper()
	n := partitioned(t)
	d := n.GPU.Status.Devices[0]
	n.Labels[v1alpha1.LabelConfig] = "research-0123456789"
	n.GPU.Spec = v1alpha1.GPUNodeSpec{
		PolicyName: "research", Strategy: v1alpha1.StrategyMIG, ConfigName: "research-0123456789", Release: &release,
		Devices:  []v1alpha1.DeviceSpec{{UUID: d.UUID, Sharing: d.Sharing}},
		Baseline: &v1alpha1.Baseline{Devices: []v1alpha1.DeviceSpec{{UUID: d.UUID, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}}}},
	}
	return n
}

// TestPreviewsOfADeletion compares what plan --delete prints with testdata/plan-delete-*.golden.
func TestPreviewsOfADeletion(t *testing.T) {
	evict := v1alpha1.Release{PolicyName: "research", ReleasePolicy: v1alpha1.ReleasePolicyRestore, Drain: v1alpha1.Drain{Mode: v1alpha1.DrainModeEvict}}
	holding := func(n cluster.Node) cluster.Node {
		hold(&n, "train", 0, &n.GPU.Status.Devices[0].Instances[0].ID)
		hold(&n, "daemon", 0, &n.GPU.Status.Devices[0].Instances[1].ID)
		n.Pods[1].Controller = "DaemonSet"
		return n
	}
	for name, situation := range map[string]func(*testing.T) (cluster.Snapshot, change){
		"the last policy": func(t *testing.T) (cluster.Snapshot, change) {
			unchanged := newNode(t, "b", sim.A100)
			s := snapshotOf(holding(governed(t, evict)), unchanged)
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", mixedLayout)}
			return s, change{deleted: []string{"research"}}
		},
		"a policy that retains": func(t *testing.T) (cluster.Snapshot, change) {
			s := snapshotOf(governed(t, v1alpha1.Release{PolicyName: "research", ReleasePolicy: v1alpha1.ReleasePolicyRetain}))
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", mixedLayout)}
			return s, change{deleted: []string{"research"}}
		},
		"and the one below governs": func(t *testing.T) (cluster.Snapshot, change) {
			s := snapshotOf(holding(governed(t, evict)))
			research := policy(t, "research", mixedLayout)
			research.Spec.Priority = 1
			s.Policies = []v1alpha1.GPUSharingPolicy{research, policy(t, "everywhere", slicing)}
			return s, change{deleted: []string{"research"}}
		},
		"and a paused one is left": func(t *testing.T) (cluster.Snapshot, change) {
			s := snapshotOf(governed(t, evict))
			other := policy(t, "other", slicing)
			other.Spec.Rollout.Paused, other.Spec.NodeSelector = true, &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "b"}}
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", mixedLayout), other}
			return s, change{deleted: []string{"research"}}
		},
		"a policy that was always paused": func(t *testing.T) (cluster.Snapshot, change) {
			s := snapshotOf(newNode(t, "a", sim.A100))
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", mixedLayout)}
			s.Policies[0].Spec.Rollout.Paused = true
			return s, change{deleted: []string{"research"}}
		},
		"and its taints go": func(t *testing.T) (cluster.Snapshot, change) {
			a, b := governed(t, evict), newNode(t, "b", sim.A100)
			tainted := policy(t, "research", mixedLayout)
			tainted.Spec.Taints = []v1alpha1.Taint{{Key: "example.com/shared", Effect: "NoSchedule"}}
			for _, n := range []*cluster.Node{&a, &b} {
				n.Taints = []corev1.Taint{{Key: "example.com/shared", Effect: "NoSchedule"}}
				n.Annotations = map[string]string{v1alpha1.AnnotationTaints: "example.com/shared:NoSchedule"}
			}
			s := snapshotOf(a, b)
			s.Policies = []v1alpha1.GPUSharingPolicy{tainted}
			return s, change{deleted: []string{"research"}}
		},
		"and workloads find nothing to run on": func(t *testing.T) (cluster.Snapshot, change) {
			a, b := governed(t, evict), governed(t, evict)
			asking := func(n *cluster.Node, pod, resource string, count int64) {
				n.Pods = append(n.Pods, cluster.Pod{
					Namespace: "team", Name: pod, UID: pod, GPU: true, Requests: map[string]int64{resource: count}, Workload: "Deployment team/" + strings.TrimRight(pod, "-12"),
				})
			}
			asking(&a, "small-1", "nvidia.com/mig-1g.5gb", 1)
			asking(&a, "whole", "nvidia.com/gpu", 1)
			b.Name, b.GPU.Name, b.Labels["pool"] = "b", "b", "b"
			asking(&b, "small-2", "nvidia.com/mig-1g.5gb", 1)
			s := snapshotOf(a, b, newNode(t, "c", sim.T4))
			s.Unscheduled = []cluster.Pod{
				{Namespace: "team", Name: "waits", GPU: true, Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1}, Workload: "Job team/waits"},
				{Namespace: "team", Name: "never", GPU: true, Requests: map[string]int64{"nvidia.com/mig-7g.40gb": 1}, Workload: "Job team/never"},
				{
					Namespace: "team", Name: "pinned", GPU: true, Requests: map[string]int64{"nvidia.com/mig-2g.10gb": 1}, Workload: "Job team/pinned",
					NodeSelector: map[string]string{"pool": "c"},
				},
			}
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", mixedLayout)}
			s.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchExpressions: []v1alpha1.NodeSelectorRequirement{
				{Key: "pool", Operator: "NotIn", Values: []string{"c"}},
			}}
			return s, change{deleted: []string{"research"}}
		},
		"and a workload depends on what the administrator configured": func(t *testing.T) (cluster.Snapshot, change) {
			a := governed(t, evict)
			a.Pods = []cluster.Pod{{Namespace: "team", Name: "small", UID: "x", GPU: true, Requests: map[string]int64{"nvidia.com/mig-1g.5gb": 1}}}
			a.GPU.Spec.Baseline.Labels = map[string]string{v1alpha1.LabelConfig: "a100-shared"}
			s := snapshotOf(a)
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", mixedLayout)}
			return s, change{deleted: []string{"research"}}
		},
		"and the one below shares what two GPUs were asked of": func(t *testing.T) (cluster.Snapshot, change) {
			a := newNode(t, "a", sim.T4, sim.T4)
			a.Pods = []cluster.Pod{{Namespace: "team", Name: "two", UID: "x", GPU: true, Requests: map[string]int64{"nvidia.com/gpu": 2}, Workload: "Job team/two"}}
			s := snapshotOf(a)
			whole := policy(t, "whole", `{sharing: {strategy: Exclusive}}`)
			whole.Spec.Priority = 1
			s.Policies = []v1alpha1.GPUSharingPolicy{whole, policy(t, "everywhere", slicing)}
			return s, change{deleted: []string{"whole"}}
		},
		"and another under a new name": func(t *testing.T) (cluster.Snapshot, change) {
			s := snapshotOf(governed(t, evict))
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", mixedLayout)}
			return s, change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "science", mixedLayout)}, deleted: []string{"research"}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, c := situation(t)
			compare(t, "plan delete "+name, func(shown *text) { shown.plan(s, c) })
		})
	}
}

func TestOnlyAPolicyThatExistsIsDeleted(t *testing.T) {
	g := NewWithT(t)
	s := snapshotOf()
	s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", slicing)}
	g.Expect(knows(s, change{deleted: []string{"research"}})).To(Succeed())
	g.Expect(knows(s, change{deleted: []string{"research", "reseach"}})).To(MatchError(ContainSubstring(`there is no policy "reseach" to delete`)))
	both := change{applied: s.Policies, deleted: []string{"research"}}
	g.Expect(knows(s, both)).To(MatchError(ContainSubstring(`policy "research" is in a file and in --delete`)))
}

// TestWhatAShareMeans: a policy's effect on the memory of each container, and the slices that a layout leaves unused.
func TestWhatAShareMeans(t *testing.T) {
	for name, test := range map[string]struct {
		model          sim.Model
		policy         string
		unused, memory []string
	}{
		"time-slicing": {
			model: sim.T4, policy: slicing,
			memory: []string{"GPU 0 (Tesla-T4): 4 containers share the 15.0 GiB of each GPU; nothing reserves or limits what one takes"},
		},
		"time-slicing that the driver limits": {
			model: sim.T4, policy: `{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {limit: Enforce}}}}`,
			memory: []string{"GPU 0 (Tesla-T4): 4 containers share the 15.0 GiB of each GPU; nothing reserves memory, and the driver limits what a pod takes, where it can"},
		},
		"MPS": {
			model: sim.T4, policy: `{sharing: {strategy: MPS, mps: {replicas: 4}}}`,
			memory: []string{"GPU 0 (Tesla-T4): each MPS client (a process) gets up to 25% of the threads and 3.8 GiB of memory"},
		},
		"MPS with more memory than there is": {
			model: sim.T4, policy: `{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: 8Gi}}}`,
			memory: []string{"GPU 0 (Tesla-T4): each MPS client (a process) gets up to 25% of the threads and 8.0 GiB of memory; " +
				"4 clients that take it all need 32.0 GiB, and the GPU has 15.0 GiB"},
		},
		"whole GPUs": {model: sim.T4, policy: `{sharing: {strategy: Exclusive}}`},
		"MIG that uses everything": {
			model: sim.A100, policy: `{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20gb, count: 1}, {profile: 2g.10gb, count: 2}]}]}}}`,
		},
		"instances that are shared": {
			model: sim.A100, policy: `{sharing: {strategy: MIG, mig: {layouts: [{fill: 3g.20gb, replicas: 2}]}}}`,
			unused: []string{"GPU 0 (NVIDIA-A100-SXM4-40GB): 1 of 7 compute slices"},
			memory: []string{"GPU 0 (NVIDIA-A100-SXM4-40GB): 2 containers share the 19.5 GiB of each instance 3g.20gb; nothing reserves or limits what one takes"},
		},
		"instances that are shared under the name of GPUs": {
			model: sim.A100, policy: `{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g.5gb, replicas: 3}]}}}`,
			unused: []string{"GPU 0 (NVIDIA-A100-SXM4-40GB): 1 of 8 memory slices (5.0 GiB)"},
			memory: []string{"GPU 0 (NVIDIA-A100-SXM4-40GB): 3 containers share the 4.8 GiB of each instance 1g.5gb; nothing reserves or limits what one takes"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			n := newNode(t, "a", test.model)
			s := snapshotOf(n)
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "p", test.policy)}
			d := rollout.Decide(s)
			g.Expect(d.Nodes).To(HaveLen(1))
			g.Expect(d.Nodes[0].State).NotTo(Equal(node.Unsupported), d.Nodes[0].Message)
			p := partsOf(d.Nodes[0], plan.Devices(n.GPU.Status.Devices))
			g.Expect(p.unused.lines()).To(ConsistOf(test.unused))
			g.Expect(p.memory.lines()).To(ConsistOf(test.memory))
		})
	}
}
