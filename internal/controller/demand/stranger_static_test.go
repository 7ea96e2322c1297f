// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// TestANodeWithAStaticGPUIsNotOverbooked by a pod that has one of its instances by an init container, which no agent reports: the node has as many as its pods
// ask for.
func TestANodeWithAStaticGPUIsNotOverbooked(t *testing.T) {
	for _, names := range [][]string{{"busy"}, {"busy", "inits"}} {
		g, p := NewWithT(t), applying()
		of := p.Spec.Sharing.MIG.Layouts[0].OnDemand
		of.Profiles = []v1alpha1.MIGProfile{"3g", "7g"}
		p.Spec.Sharing.MIG.Layouts = []v1alpha1.MIGLayout{
			{GPUs: &v1alpha1.GPUMatch{Indexes: []int32{0}}, Fill: "3g"},
			{GPUs: &v1alpha1.GPUMatch{Indexes: []int32{1}}, Fill: "7g", OnDemand: of},
		}
		a := a100s(t, "a", 2)
		devices := plan.Devices(a.GPU.Status.Devices)
		devices[1].State.Instances = []gpu.Instance{{Profile: "7g.40gb", ID: 3, UUID: "MIG-7", Placement: gpu.Placement{Size: 8}}}
		devices[0].Holders = []gpu.Holder{{Namespace: "other", Pod: "busy", Container: "c", Instance: 1}}
		a.GPU.Status.Devices = plan.Reported(devices)
		for d := range a.GPU.Status.Devices {
			for i := range a.GPU.Status.Devices[d].Instances {
				a.GPU.Status.Devices[d].Instances[i].LastHeldTime = metav1.NewTime(now.Add(-time.Hour))
			}
		}
		rests(&a)
		for _, name := range names {
			a.Pods = append(a.Pods, cluster.Pod{
				Namespace: "other", Name: name, UID: name, GPU: true, InitHolds: name == "inits", Scheduled: now.Add(-time.Hour), Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1},
			})
		}
		s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a}}
		_, status, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, []*corev1.Pod{waits("w", "3g.20gb", nil)})
		g.Expect(status.Planned).To(BeEquivalentTo(1), "beside %v: %s", names, is.Message)
	}
}
