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

// TestTheReserveIsNoneOfALostNode, or of one that is cordoned, or that Karpenter or Cluster Autoscaler removes, which need not cordon it: no pod can have it.
func TestTheReserveIsNoneOfALostNode(t *testing.T) {
	for _, taint := range []string{"", corev1.TaintNodeUnreachable, corev1.TaintNodeUnschedulable, "karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"} {
		t.Run(taint, func(t *testing.T) {
			g, p := NewWithT(t), applying()
			of := p.Spec.Sharing.MIG.Layouts[0].OnDemand
			of.Profiles, of.Reserve = []v1alpha1.MIGProfile{"3g", "7g"}, []v1alpha1.MIGReserve{{Profile: "3g", Count: 2}}
			a, b := a100s(t, "a", 1), a100s(t, "b", 1)
			rests(&a)
			rests(&b)
			if taint != "" {
				a.Taints = []corev1.Taint{{Key: taint, Effect: corev1.TaintEffectNoSchedule}}
			}
			s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a, b}}
			decided, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
			g.Expect(len(decided["a"])+len(decided["b"])).To(Equal(map[bool]int{true: 1, false: 0}[taint == ""]), "%s %v", is.Message, decided)
		})
	}
}

// TestTheReserveIsMadeWherePodsCanHaveIt: not on a node that takes none, where it does not count once it is there.
func TestTheReserveIsMadeWherePodsCanHaveIt(t *testing.T) {
	for _, taint := range []string{"", corev1.TaintNodeUnschedulable, "karpenter.sh/disrupted"} {
		t.Run(taint, func(t *testing.T) {
			g, p := NewWithT(t), applying()
			p.Spec.Sharing.MIG.Layouts[0].Fill = ""
			p.Spec.Sharing.MIG.Layouts[0].Instances = []v1alpha1.MIGInstances{{Profile: "3g", Count: 1}}
			of := p.Spec.Sharing.MIG.Layouts[0].OnDemand
			of.Profiles, of.Reserve = []v1alpha1.MIGProfile{"1g", "3g"}, []v1alpha1.MIGReserve{{Profile: "1g", Count: 1}}
			a, b := a100s(t, "a", 1), a100s(t, "b", 1)
			for _, n := range []*cluster.Node{&a, &b} {
				n.GPU.Status.Devices[0].Instances = n.GPU.Status.Devices[0].Instances[:1]
				rests(n)
			}
			if taint != "" {
				a.Taints = []corev1.Taint{{Key: taint, Effect: corev1.TaintEffectNoSchedule}}
			}
			s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a, b}}
			decided, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, nil)
			if taint == "" {
				g.Expect(len(decided["a"])+len(decided["b"])).To(Equal(1), is.Message)
				return
			}
			g.Expect(decided["b"]).To(HaveLen(1), "%v", decided)
			g.Expect(decided["a"]).To(BeEmpty())
		})
	}
}

// TestWhatIsSaidWhileTheRolloutIsPaused: nothing is being made.
func TestWhatIsSaidWhileTheRolloutIsPaused(t *testing.T) {
	g, p := NewWithT(t), applying()
	a := a100s(t, "a", 1)
	rests(&a)
	p.Spec.Rollout.Paused = true
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a}}
	decided, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
	g.Expect(decided).To(BeEmpty())
	g.Expect(is.Reason).NotTo(Equal(v1alpha1.ReasonRepartitioning), is.Message)
	g.Expect(is.Message).NotTo(ContainSubstring("which are being made"))
}

// TestWhatIsSaidOfANodeThatIsOverbooked: the profile is allowed, and another tenant's pod, bound by spec.nodeName, blocks it.
func TestWhatIsSaidOfANodeThatIsOverbooked(t *testing.T) {
	g, p := NewWithT(t), applying()
	p.Spec.Sharing.MIG.Layouts[0].OnDemand.Profiles = []v1alpha1.MIGProfile{"3g", "7g"}
	a := a100s(t, "a", 1)
	rests(&a)
	a.Pods = []cluster.Pod{{Namespace: "other", Name: "idles", UID: "idles", GPU: true, Scheduled: now.Add(-time.Hour), Requests: map[string]int64{"nvidia.com/mig-7g.40gb": 1}}}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a}}
	_, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
	g.Expect(is.Status).To(Equal(metav1.ConditionFalse))
	g.Expect(is.Reason).NotTo(Equal(v1alpha1.ReasonProfileNotAllowed), is.Message)
	g.Expect(is.Message).To(ContainSubstring("other/idles"))
}

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
