// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"fmt"
	"maps"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

var now = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

const (
	a100   = "NVIDIA-A100-SXM4-40GB"
	t4     = "Tesla-T4"
	shared = "nvidia.com/gpu.shared"
)

// policy is a policy with a spec in YAML.
func policy(t *testing.T, name, spec string) v1alpha1.GPUSharingPolicy {
	t.Helper()
	p := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(now)}}
	NewWithT(t).Expect(yaml.UnmarshalStrict([]byte(spec), &p.Spec)).To(Succeed())
	return p
}

// Strategies, each for a node with one GPU or more.
const (
	renamed   = "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}"
	unrenamed = "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}}"
	mps       = "sharing: {strategy: MPS, mps: {replicas: 4}, advertise: {renameByDefault: true}}"
	filled    = "sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}"
	single    = "sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g.5gb}]}}"
	layout    = "sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 2}, {profile: 3g.20gb, count: 1}]}]}}"
	exclusive = "sharing: {strategy: Exclusive}"
)

// node is a node with GPUs of a product.
func node(name, product string, count int, labels map[string]string) cluster.Node {
	n := cluster.Node{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name, "nvidia.com/gpu.present": "true"}, Annotations: map[string]string{}}
	maps.Copy(n.Labels, labels)
	for i := range count {
		n.GPU.Status.Devices = append(n.GPU.Status.Devices, v1alpha1.DeviceStatus{
			UUID: fmt.Sprintf("GPU-%s-%d", name, i), Index: int32(i), Product: product, MemoryMiB: 40960, ComputeCapability: "8.0", MIGCapable: product == a100,
			Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
		})
	}
	return n
}

func pool(name string, labels map[string]string) autoscaling.Pool {
	p := autoscaling.Pool{Name: name, Labels: map[string]string{"karpenter.sh/nodepool": name}, Limits: map[string]string{}}
	maps.Copy(p.Labels, labels)
	return p
}

// karpenter is a snapshot with NodePool gpu and NodeOverlays.
func karpenter(t *testing.T, spec string, nodes ...cluster.Node) autoscaling.Snapshot {
	t.Helper()
	return autoscaling.Snapshot{
		Now: now, Policies: []v1alpha1.GPUSharingPolicy{policy(t, "research", spec)}, Nodes: nodes,
		Pools: []autoscaling.Pool{pool("gpu", nil)}, OverlayVersion: autoscaling.KnownOverlayVersion,
	}
}

// inPool is the labels of a node of NodePool gpu.
func inPool(instanceType string) map[string]string {
	return map[string]string{"karpenter.sh/nodepool": "gpu", "node.kubernetes.io/instance-type": instanceType}
}

const declared = `
autoscaling: {mode: Manage, nodeShapes: [{product: NVIDIA-A100-SXM4-40GB, gpusPerNode: 2, instanceTypes: [gpu.two], nodeGroups: [{kind: NodePool, name: gpu}]}]}`

// only is the only group of policy research.
func only(t *testing.T, s autoscaling.Snapshot) autoscaling.Group {
	t.Helper()
	groups := s.Advise().Groups["research"]
	NewWithT(t).Expect(groups).To(HaveLen(1))
	return groups[0]
}

// offers are the resources of a group.
func offers(g autoscaling.Group) map[string]int64 {
	counts := map[string]int64{}
	for _, r := range g.Resources {
		counts[r.Name] = r.Count
	}
	return counts
}
