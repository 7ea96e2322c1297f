// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"fmt"
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

// TestPodsOnAnotherNodeUseNoInstanceOfThisOne: a pod that never starts (a volume that is lost) has 7g made and left idle, while the tenant binds a pod that asks
// for 7g to a node that has none every 50 seconds (spec.nodeName), which its kubelet lets pass (removeMissingExtendedResources). No attempt ever fails.
func TestPodsOnAnotherNodeUseNoInstanceOfThisOne(t *testing.T) {
	g, p := NewWithT(t), applying()
	p.Spec.Sharing.MIG.Layouts[0].OnDemand.Profiles = []v1alpha1.MIGProfile{"3g", "7g"}
	a, b := a100s(t, "a", 1), a100s(t, "b", 1)
	devices := plan.Devices(a.GPU.Status.Devices)
	devices[0].State.Instances = []gpu.Instance{{Profile: "7g.40gb", ID: 3, UUID: "MIG-7", Placement: gpu.Placement{Size: 8}}}
	a.GPU.Status.Devices = plan.Reported(devices)
	a.GPU.Status.Devices[0].Instances[0].LastHeldTime = metav1.NewTime(now.Add(-time.Hour))
	rests(&a)
	rests(&b)
	a.GPU.Status.Demand = []v1alpha1.GPUDemand{{UUID: "a-0", Instances: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}, FirstPod: "team/lost", SinceTime: metav1.NewTime(now.Add(-time.Hour))}}
	lost := waits("lost", "7g.40gb", func(pod *corev1.Pod) {
		pod.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-time.Hour))
	})
	s, attempts, failed := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a, b}}, demand.Attempts{}, false
	for second := 0; second < 3600; second += 10 {
		if second%50 == 0 {
			name := fmt.Sprint("decoy-", second)
			s.Nodes[1].Pods = []cluster.Pod{{Namespace: "team", Name: name, UID: name, GPU: true, Scheduled: s.Now, Requests: map[string]int64{"nvidia.com/mig-7g.40gb": 1}}}
		}
		_, status, _, _ := review(&pure.Memory{}, attempts, p, s, []*corev1.Pod{lost})
		failed = failed || len(status.Requests) > 0 && status.Requests[0].Reason == v1alpha1.ReasonAdvertisedNotScheduled
		s.Now = s.Now.Add(10 * time.Second)
	}
	g.Expect(failed).To(BeTrue(), "the GPU was kept for the pod for an hour in which the scheduler left it idle")
}
