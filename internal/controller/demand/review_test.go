// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

var now = time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)

// onDemand is a policy with one layout on demand.
func onDemand(change func(*v1alpha1.MIGOnDemand)) *v1alpha1.GPUSharingPolicy {
	p := &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}}
	of := &v1alpha1.MIGOnDemand{Mode: v1alpha1.OnDemandModeAdvise, Profiles: []v1alpha1.MIGProfile{"1g", "2g", "3g"}, IdleSeconds: 300}
	if change != nil {
		change(of)
	}
	p.Spec.Sharing = v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{Layouts: []v1alpha1.MIGLayout{{Fill: "3g", OnDemand: of}}}}
	return p
}

// a100s is a node of the policy with A100s that have two instances of 3g each.
func a100s(t *testing.T, name string, gpus int) cluster.Node {
	t.Helper()
	var devices []gpu.Device
	for n := range gpus {
		d, _ := catalogue.Find("NVIDIA-A100-SXM4-40GB")
		d.UUID, d.Index, d.MIGCapable, d.PendingMIG = fmt.Sprint(name, "-", n), n, true, true
		d.State = gpu.State{MIG: true, Instances: []gpu.Instance{
			{Profile: "3g.20gb", ID: 1, UUID: fmt.Sprint("MIG-1-", n), Placement: gpu.Placement{Start: 0, Size: 4}},
			{Profile: "3g.20gb", ID: 2, UUID: fmt.Sprint("MIG-2-", n), Placement: gpu.Placement{Start: 4, Size: 4}},
		}}
		devices = append(devices, d)
	}
	n := cluster.Node{Name: name, Labels: map[string]string{"zone": name}}
	n.GPU.Name, n.GPU.Spec.PolicyName = name, "research"
	n.GPU.Status.Devices = plan.Reported(devices)
	for d := range n.GPU.Status.Devices {
		for i := range n.GPU.Status.Devices[d].Instances {
			n.GPU.Status.Devices[d].Instances[i].LastHeldTime = metav1.NewTime(now.Add(-5 * time.Minute))
		}
	}
	n.GPU.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue}}
	return n
}

// review is what demand.Review decides and reports.
func review(m *pure.Memory, a demand.Attempts, p *v1alpha1.GPUSharingPolicy, s *cluster.Snapshot, pods []*corev1.Pod) (
	map[string][]v1alpha1.GPUDemand, *v1alpha1.OnDemandStatus, metav1.Condition, time.Time,
) {
	r := demand.Review(m, s, demand.Asked{Policy: p, Pods: pods, Attempts: a})[p.Name]
	return r.Decided, r.Status, r.Condition, r.Next
}

// waits is a pod that waits for an instance of a profile since a minute ago.
func waits(name, profile string, change func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
	pod.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
		corev1.ResourceName(plan.ResourceOf(profile)): resource.MustParse("1"),
	}}}}
	pod.Status.Phase = corev1.PodPending
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, LastTransitionTime: metav1.NewTime(now.Add(-time.Minute)),
	}}
	if change != nil {
		change(pod)
	}
	return pod
}

func TestWhichPodsWait(t *testing.T) {
	yes := true
	says := func(reason, message string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Status.Conditions[0].Reason, p.Status.Conditions[0].Message = reason, message }
	}
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   bool
	}{
		"one that the scheduler found no room for": {nil, true},
		"one that it has not seen":                 {func(p *corev1.Pod) { p.Status.Conditions = nil }, false},
		"one that a gate holds back":               {says(corev1.PodReasonSchedulingGated, ""), false},
		"one for which it evicts others":           {func(p *corev1.Pod) { p.Status.NominatedNodeName = "a" }, false},
		"one that ends":                            {func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: now} }, false},
		"one on a node":                            {func(p *corev1.Pod) { p.Spec.NodeName = "a" }, false},
		"one of a DaemonSet": {func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Controller: &yes}}
		}, false},
		"one that asks for a whole GPU": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		}, false},
		"KAI: over the limit of the queue": {says("Unschedulable", "OverLimit: team quota has reached the allowable limit of GPUs. Limit is 1 GPUs"), false},
		"KAI: over its quota":              {says("Unschedulable", "Node-Pool 'a': NonPreemptibleOverQuota: Non-preemptible workload is over quota."), false},
		"KAI: no such queue":               {says("Unschedulable", "QueueDoesNotExist: Queue 'b' does not exist"), false},
		"KAI: it has a node":               {says("BindingError", "Failed to bind pod"), false},
		"Volcano: its queue does not let it in, or the cluster has too little; which, the pod does not say": {
			says("Unschedulable", "pod group is not ready, 1 Pending, 1 minAvailable; Pending: 1 Unschedulable"), true,
		},
		"Volcano: it has a node, once its gang has": {says("Schedulable", "Pod team/a can possibly be assigned to a, once minAvailable is satisfied"), false},
		"Volcano: it could not be bound":            {says("SchedulerError", "failed to bind"), false},
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(demand.Waits(waits("a", "1g.5gb", c.change))).To(Equal(c.want))
		})
	}
}

// TestReview: what a policy reports, and under which reason.
func TestReview(t *testing.T) {
	node := func(change func(*cluster.Node)) *cluster.Snapshot {
		s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 1)}}
		if change != nil {
			change(&s.Nodes[0])
		}
		return s
	}
	hold := func(n *cluster.Node, ids ...int32) {
		for _, id := range ids {
			n.GPU.Status.Devices[0].Holders = append(n.GPU.Status.Devices[0].Holders, v1alpha1.HolderStatus{
				Namespace: "other", PodName: fmt.Sprint("h", id), ContainerName: "c", Instance: &id,
			})
			n.Pods = append(n.Pods, cluster.Pod{Namespace: "other", Name: fmt.Sprint("h", id), GPU: true})
		}
	}
	idleFor := func(n *cluster.Node, instance int, d time.Duration) {
		n.GPU.Status.Devices[0].Instances[instance].LastHeldTime = metav1.NewTime(now.Add(-d))
	}
	one := func(profile string) []*corev1.Pod { return []*corev1.Pod{waits("w", profile, nil)} }
	for name, c := range map[string]struct {
		change   func(*v1alpha1.MIGOnDemand)
		snapshot *cluster.Snapshot
		pods     []*corev1.Pod
		status   metav1.ConditionStatus
		reason   string
		counts   [4]int32 // pods, ready, planned, unmet
		gpus     int32
		message  string
	}{
		"nobody waits":     {nil, node(nil), nil, metav1.ConditionTrue, v1alpha1.ReasonNoDemand, [4]int32{}, 0, "No pod waits"},
		"an idle instance": {nil, node(nil), one("3g.20gb"), metav1.ConditionTrue, v1alpha1.ReasonInstancesIdle, [4]int32{1, 1, 0, 0}, 0, "are idle"},
		"an idle instance of a profile that may not be made": {
			func(of *v1alpha1.MIGOnDemand) { of.Profiles = []v1alpha1.MIGProfile{"1g"} }, node(nil), one("3g.20gb"),
			metav1.ConditionTrue, v1alpha1.ReasonInstancesIdle,
			[4]int32{1, 1, 0, 0},
			0, "are idle",
		},
		"a held instance of a profile that may not be made": {
			func(of *v1alpha1.MIGOnDemand) { of.Profiles = []v1alpha1.MIGProfile{"1g"} }, node(func(n *cluster.Node) { hold(n, 1, 2) }), one("3g.20gb"),
			metav1.ConditionFalse, v1alpha1.ReasonProfileNotAllowed,
			[4]int32{1, 0, 0, 1},
			0, "",
		},
		"an idle instance of a profile that may not be made stays for whom waits for it": {
			func(of *v1alpha1.MIGOnDemand) { of.Profiles = []v1alpha1.MIGProfile{"1g"} }, node(func(n *cluster.Node) { hold(n, 1) }),
			append(one("3g.20gb"), waits("x", "1g.5gb", nil)), metav1.ConditionFalse, v1alpha1.ReasonNoIdleRoom,
			[4]int32{2, 1, 0, 1},
			0, "",
		},
		"a profile that the layout lacks": {nil, node(nil), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonRepartitionAdvised, [4]int32{1, 0, 1, 0}, 1, "1 would start if 1 GPUs had others"},
		"a profile that may not be made":  {nil, node(nil), one("7g.40gb"), metav1.ConditionFalse, v1alpha1.ReasonProfileNotAllowed, [4]int32{1, 0, 0, 1}, 0, "such as team/w"},
		"a profile of another GPU":        {nil, node(nil), one("1g.6gb"), metav1.ConditionTrue, v1alpha1.ReasonNoDemand, [4]int32{}, 0, ""},
		"no node that would take it": {nil, node(nil), []*corev1.Pod{waits("w", "1g.5gb", func(p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{"zone": "z"}
		})}, metav1.ConditionTrue, v1alpha1.ReasonNoDemand, [4]int32{}, 0, ""},
		"a taint that it does not tolerate": {nil, node(func(n *cluster.Node) {
			n.Taints = []corev1.Taint{{Key: "a", Effect: corev1.TaintEffectNoSchedule}}
		}), one("1g.5gb"), metav1.ConditionTrue, v1alpha1.ReasonNoDemand, [4]int32{}, 0, ""},
		"more than a node can have": {nil, node(nil), []*corev1.Pod{waits("w", "1g.5gb", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits["nvidia.com/mig-1g.5gb"] = resource.MustParse("1000000000000")
		})}, metav1.ConditionTrue, v1alpha1.ReasonNoDemand, [4]int32{}, 0, ""},
		"more of a profile than its GPUs can have": {nil, node(nil), []*corev1.Pod{waits("w", "3g.20gb", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits["nvidia.com/mig-3g.20gb"] = resource.MustParse("3")
		})}, metav1.ConditionTrue, v1alpha1.ReasonNoDemand, [4]int32{}, 0, ""},
		"profiles that no node has together": {nil, &cluster.Snapshot{Now: now, Nodes: []cluster.Node{
			mixed(t, "a", "NVIDIA-A100-SXM4-40GB"), mixed(t, "b", "NVIDIA-A30"),
		}}, []*corev1.Pod{waits("w", "1g.5gb", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits["nvidia.com/mig-1g.6gb"] = resource.MustParse("1")
		})}, metav1.ConditionTrue, v1alpha1.ReasonNoDemand, [4]int32{}, 0, ""},
		"profiles that a node has together": {nil, &cluster.Snapshot{Now: now, Nodes: []cluster.Node{
			mixed(t, "a", "NVIDIA-A100-SXM4-40GB", "NVIDIA-A30"),
		}}, []*corev1.Pod{waits("w", "1g.5gb", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits["nvidia.com/mig-1g.6gb"] = resource.MustParse("1")
		})}, metav1.ConditionFalse, v1alpha1.ReasonRepartitionAdvised, [4]int32{1, 0, 1, 0}, 2, ""},
		"all held":         {nil, node(func(n *cluster.Node) { hold(n, 1, 2) }), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonNoIdleRoom, [4]int32{1, 0, 0, 1}, 0, "held by other/h"},
		"all but one held": {nil, node(func(n *cluster.Node) { hold(n, 1) }), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonRepartitionAdvised, [4]int32{1, 0, 1, 0}, 1, ""},
		"one held, and one of a pod that is bound and not reported yet": {nil, node(func(n *cluster.Node) {
			hold(n, 1)
			n.Pods = append(n.Pods, cluster.Pod{Namespace: "other", Name: "bound", Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1}})
		}), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonNoIdleRoom, [4]int32{1, 0, 0, 1}, 0, "held by other/"},
		"a process that belongs to no pod": {nil, node(func(n *cluster.Node) {
			hold(n, 1)
			n.GPU.Status.Devices[0].Processes = []v1alpha1.ProcessStatus{{PID: 7, Name: "x", Instance: new(int32(2))}}
		}), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonNoIdleRoom, [4]int32{1, 0, 0, 1}, 0, ""},
		"an instance that the device plugin calls unhealthy": {nil, node(func(n *cluster.Node) {
			hold(n, 1)
			n.Allocatable, n.Unallocatable = map[string]int64{"nvidia.com/mig-3g.20gb": 1}, map[string]int64{"nvidia.com/mig-3g.20gb": 1}
		}), one("3g.20gb"), metav1.ConditionFalse, v1alpha1.ReasonNoIdleRoom, [4]int32{1, 0, 0, 1}, 0, ""},
		"one is idle for long enough soon": {nil, node(func(n *cluster.Node) {
			idleFor(n, 0, 4*time.Minute)
			idleFor(n, 1, 3*time.Minute)
		}), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonIdleTooShort, [4]int32{1, 0, 0, 1}, 0, "idle for long enough at " + format.Clock(now.Add(time.Minute))},
		"one is idle for long enough, the other not": {
			nil, node(func(n *cluster.Node) { idleFor(n, 0, time.Minute) }), one("1g.5gb"),
			metav1.ConditionFalse, v1alpha1.ReasonRepartitionAdvised,
			[4]int32{1, 0, 1, 0},
			1, "",
		},
		"nothing says for how long": {nil, node(func(n *cluster.Node) {
			for i := range n.GPU.Status.Devices[0].Instances {
				n.GPU.Status.Devices[0].Instances[i].LastHeldTime = metav1.Time{}
			}
		}), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonIdleTooShort, [4]int32{1, 0, 0, 1}, 0, ""},
		"the reserve": {func(of *v1alpha1.MIGOnDemand) {
			of.Reserve = []v1alpha1.MIGReserve{{Profile: "3g", Count: 2}}
		}, node(nil), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonReserveKept, [4]int32{1, 0, 0, 1}, 0, ""},
		"a node that is not ready": {nil, node(func(n *cluster.Node) {
			n.GPU.Status.Conditions[0].Status = metav1.ConditionFalse
			n.Taints = []corev1.Taint{{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule}}
		}), one("1g.5gb"), metav1.ConditionFalse, v1alpha1.ReasonGPUsChanging, [4]int32{1, 0, 0, 1}, 0, ""},
		"a node of another policy": {nil, node(func(n *cluster.Node) { n.GPU.Spec.PolicyName = "other" }), one("1g.5gb"), metav1.ConditionTrue, v1alpha1.ReasonNoDemand, [4]int32{}, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			_, s, is, _ := review(&pure.Memory{}, demand.Attempts{}, onDemand(c.change), c.snapshot, c.pods)
			g.Expect([]any{is.Status, is.Reason}).To(Equal([]any{c.status, c.reason}), is.Message)
			g.Expect([4]int32{s.Pods, s.Ready, s.Planned, s.Unmet}).To(Equal(c.counts))
			g.Expect(s.GPUs).To(Equal(c.gpus))
			g.Expect(is.Message).To(ContainSubstring(c.message))
		})
	}
}

// TestAReviewComesBackWhenAnInstanceIsIdleForLongEnough, since no event tells that.
func TestAReviewComesBackWhenAnInstanceIsIdleForLongEnough(t *testing.T) {
	g := NewWithT(t)
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 1)}}
	for i := range s.Nodes[0].GPU.Status.Devices[0].Instances {
		s.Nodes[0].GPU.Status.Devices[0].Instances[i].LastHeldTime = metav1.NewTime(now.Add(-4 * time.Minute))
	}
	pods := []*corev1.Pod{waits("w", "1g.5gb", nil)}
	_, status, _, next := review(&pure.Memory{}, demand.Attempts{}, onDemand(nil), s, pods)
	g.Expect(next).To(BeTemporally("==", now.Add(time.Minute)))
	g.Expect(status.Requests[0].UntilTime.Time).To(BeTemporally("==", next))
	s.Now = next
	_, status, _, next = review(&pure.Memory{}, demand.Attempts{}, onDemand(nil), s, pods)
	g.Expect(status.Planned).To(BeEquivalentTo(1))
	g.Expect(next.IsZero()).To(BeTrue())
}

// TestAReviewIsBounded, and the same whatever the order of the pods, and with what the memory keeps.
func TestAReviewIsBounded(t *testing.T) {
	g := NewWithT(t)
	s := &cluster.Snapshot{Now: now}
	for n := range 20 {
		s.Nodes = append(s.Nodes, a100s(t, fmt.Sprintf("n%02d", n), 2))
	}
	r := rand.New(rand.NewPCG(3, 44))
	var pods []*corev1.Pod
	for n := range 60 {
		pods = append(pods, waits(fmt.Sprint("w", n), []string{"1g.5gb", "2g.10gb", "7g.40gb"}[n%3], func(p *corev1.Pod) {
			p.Spec.Priority = new(int32(n % 15))
			p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-time.Duration(n%7) * time.Minute))
		}))
	}
	memory := &pure.Memory{}
	_, first, is, _ := review(memory, demand.Attempts{}, onDemand(nil), s, pods)
	g.Expect(first.Pods).To(Equal(int32(60)))
	g.Expect(first.Ready + first.Planned + first.Unmet).To(Equal(first.Pods))
	g.Expect(first.Requests).To(HaveLen(v1alpha1.MostDemands))
	g.Expect(first.Requests[0].FirstPod).To(Equal("team/w59"), "of the highest priority, since longest")
	g.Expect(first.GPUs).To(BeNumerically(">", 0))
	g.Expect(first.Changes).To(HaveLen(min(int(first.GPUs), v1alpha1.MostDemands)))
	for range 5 {
		pods = slices.Clone(pods)
		r.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
		_, again, same, _ := review(memory, demand.Attempts{}, onDemand(nil), s, pods)
		g.Expect(again).To(Equal(first))
		g.Expect(same).To(Equal(is))
	}
}

// mixed is a node of the policy with one GPU of each product that has no instances.
func mixed(t *testing.T, name string, products ...string) cluster.Node {
	t.Helper()
	n := a100s(t, name, 1)
	var devices []gpu.Device
	for at, product := range products {
		d, found := catalogue.Find(product)
		NewWithT(t).Expect(found).To(BeTrue(), product)
		d.UUID, d.Index, d.MIGCapable, d.PendingMIG, d.State = fmt.Sprint(name, "-", at), at, true, true, gpu.State{MIG: true}
		devices = append(devices, d)
	}
	n.GPU.Status.Devices = plan.Reported(devices)
	return n
}

// TestAPodThatAsksForMoreProfilesThanAreListed, of which a pool of several products has enough, does not count: the API
// server would refuse the report, and with it all that other pods wait for.
func TestAPodThatAsksForMoreProfilesThanAreListed(t *testing.T) {
	products := []string{"NVIDIA-A100-SXM4-40GB", "NVIDIA-A30", "NVIDIA-H200"}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{mixed(t, "a", products...)}}
	all := waits("w", "1g.5gb", func(p *corev1.Pod) {
		for _, product := range products {
			d, _ := catalogue.Find(product)
			for _, profile := range d.Profiles {
				p.Spec.Containers[0].Resources.Limits[corev1.ResourceName(plan.ResourceOf(profile.Name))] = resource.MustParse("1")
			}
		}
	})
	NewWithT(t).Expect(len(all.Spec.Containers[0].Resources.Limits)).To(BeNumerically(">", 16))
	_, got, _, _ := review(&pure.Memory{}, demand.Attempts{}, onDemand(nil), s, []*corev1.Pod{all, waits("x", "1g.5gb", nil)})
	NewWithT(t).Expect([]int32{got.Pods, got.Planned}).To(Equal([]int32{1, 1}))
}

// TestPodsThatTheSameNodesWouldTakeAreOne kind, whatever says which nodes: two kinds that are equal would take turns in
// having the last room, by the order in which the cache lists pods.
func TestPodsThatTheSameNodesWouldTakeAreOne(t *testing.T) {
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 1)}}
	one, other := waits("v", "7g.40gb", nil), waits("w", "7g.40gb", func(p *corev1.Pod) {
		p.Spec.Tolerations = []corev1.Toleration{{Key: "other", Operator: corev1.TolerationOpExists}}
	})
	policy := onDemand(func(of *v1alpha1.MIGOnDemand) { of.Profiles = []v1alpha1.MIGProfile{"7g"} })
	_, got, _, _ := review(&pure.Memory{}, demand.Attempts{}, policy, s, []*corev1.Pod{one, other})
	NewWithT(t).Expect(got.Requests).To(HaveLen(1))
	_, again, _, _ := review(&pure.Memory{}, demand.Attempts{}, policy, s, []*corev1.Pod{other, one})
	NewWithT(t).Expect(again).To(Equal(got))
}

// TestWhichPodHasAnInstance that is not reported yet does not depend on the order in which the cache lists pods.
func TestWhichPodHasAnInstance(t *testing.T) {
	bound := []cluster.Pod{
		{Namespace: "other", Name: "v", Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1}},
		{Namespace: "other", Name: "w", Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1}},
	}
	var got []*v1alpha1.OnDemandStatus
	for range 2 {
		n := a100s(t, "a", 1)
		n.Pods = slices.Clone(bound)
		s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{n}}
		_, status, _, _ := review(&pure.Memory{}, demand.Attempts{}, onDemand(nil), s, []*corev1.Pod{waits("x", "1g.5gb", nil)})
		got = append(got, status)
		slices.Reverse(bound)
	}
	NewWithT(t).Expect(got[0].Requests[0].Holders).To(HaveLen(1))
	NewWithT(t).Expect(got[0]).To(Equal(got[1]))
}

// TestTheReasonIsOfPodsThatWaitOn, though ten kinds that would start come before them.
func TestTheReasonIsOfPodsThatWaitOn(t *testing.T) {
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 4)}}
	var pods []*corev1.Pod
	for n := range v1alpha1.MostDemands {
		pods = append(pods, waits(fmt.Sprint("w", n), "1g.5gb", func(p *corev1.Pod) { p.Spec.Priority = new(int32(100 - n)) }))
	}
	_, got, is, _ := review(&pure.Memory{}, demand.Attempts{}, onDemand(nil), s, append(pods, waits("x", "7g.40gb", nil)))
	NewWithT(t).Expect([]int32{got.Planned, got.Unmet}).To(Equal([]int32{10, 1}))
	NewWithT(t).Expect(is.Reason).To(Equal(v1alpha1.ReasonProfileNotAllowed))
	NewWithT(t).Expect(is.Message).To(HaveSuffix("1 would not, such as team/x"))
	NewWithT(t).Expect(got.Requests).To(HaveLen(v1alpha1.MostDemands))
}

// TestKindsOfPodsAreBounded: a tenant can make any number of kinds of pods, by what they ask for or by
// the nodes that they select. Those that do not count are said.
func TestKindsOfPodsAreBounded(t *testing.T) {
	s := &cluster.Snapshot{Now: now}
	for n := range 12 {
		s.Nodes = append(s.Nodes, a100s(t, fmt.Sprintf("n%02d", n), 8))
	}
	but := func(p *corev1.Pod, values ...string) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpNotIn, Values: values}},
			}}},
		}}
	}
	for name, c := range map[string]struct {
		change  func(n int, p *corev1.Pod)
		count   int32
		message string
	}{
		"by what they ask for": {func(n int, p *corev1.Pod) {
			limits := p.Spec.Containers[0].Resources.Limits
			limits["nvidia.com/mig-1g.5gb"] = *resource.NewQuantity(int64(n%50+1), resource.DecimalSI)
			limits["nvidia.com/mig-2g.10gb"] = *resource.NewQuantity(int64(n/50+1), resource.DecimalSI)
		}, 16, "; 984 pods more do not count"},
		"by the nodes that they select": {func(n int, p *corev1.Pod) {
			values := []string{"z"}
			for at := range 10 {
				if n>>at&1 == 1 {
					values = append(values, fmt.Sprintf("n%02d", at))
				}
			}
			but(p, values...)
		}, 16, "; 984 pods more do not count"},
		"by what they say of the same nodes": {func(n int, p *corev1.Pod) { but(p, fmt.Sprint("z", n)) }, 64, "; 936 pods more do not count"},
	} {
		t.Run(name, func(t *testing.T) {
			var pods []*corev1.Pod
			for n := range 1000 {
				pods = append(pods, waits(fmt.Sprintf("w%03d", n), "1g.5gb", func(p *corev1.Pod) { c.change(n, p) }))
			}
			_, got, is, _ := review(&pure.Memory{}, demand.Attempts{}, onDemand(nil), s, pods)
			slices.Reverse(pods)
			_, again, same, _ := review(&pure.Memory{}, demand.Attempts{}, onDemand(nil), s, pods)
			NewWithT(t).Expect(got.Pods).To(Equal(c.count))
			NewWithT(t).Expect(got.Requests[0].FirstPod).To(Equal("team/w000"))
			NewWithT(t).Expect(is.Message).To(ContainSubstring(c.message))
			NewWithT(t).Expect(again).To(Equal(got))
			NewWithT(t).Expect(same).To(Equal(is))
			_, beside, _, _ := review(&pure.Memory{}, demand.Attempts{}, onDemand(nil), s, append(pods, waits("w", "1g.5gb", func(p *corev1.Pod) {
				p.Namespace = "other"
				p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now)
			})))
			NewWithT(t).Expect(beside.Pods).To(Equal(c.count+1), "one pod of another namespace, which came last")
		})
	}
}

// TestPodsThatTheSchedulerLeaves although instances are idle get none made or kept, and are tried again ever later; who made them does not matter.
func TestPodsThatTheSchedulerLeaves(t *testing.T) {
	g, attempts := NewWithT(t), demand.Attempts{}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 1)}}
	n := 0
	look := func(after time.Duration) (*v1alpha1.OnDemandStatus, time.Duration) {
		n++ // each time it is another pod
		s.Now = s.Now.Add(after)
		_, status, _, next := review(&pure.Memory{}, attempts, onDemand(nil), s, []*corev1.Pod{waits(fmt.Sprint("w", n), "3g.20gb", nil)})
		return status, next.Sub(s.Now)
	}
	for _, backOff := range []time.Duration{time.Minute, 2 * time.Minute, 4 * time.Minute, 8 * time.Minute, 16 * time.Minute, 32 * time.Minute, 64 * time.Minute, 64 * time.Minute} {
		status, next := look(0)
		g.Expect(status.Ready).To(BeEquivalentTo(1))
		g.Expect(next).To(Equal(time.Minute))
		status, next = look(time.Minute)
		g.Expect(status.Requests[0].Reason).To(Equal(v1alpha1.ReasonAdvertisedNotScheduled))
		g.Expect(next).To(Equal(backOff))
		status, _ = look(backOff - time.Second)
		g.Expect(status.Unmet).To(BeEquivalentTo(1))
		_, status, _, _ = review(&pure.Memory{}, maps.Clone(attempts), onDemand(nil), s, []*corev1.Pod{waits("w", "3g.20gb", func(p *corev1.Pod) { p.Namespace = "other" })})
		g.Expect(status.Ready).To(BeEquivalentTo(1), "another namespace")
		s.Now = s.Now.Add(time.Second)
	}
	status, _ := look(0)
	g.Expect(status.Ready).To(BeEquivalentTo(1))
	s.Nodes[0].Pods = []cluster.Pod{{Namespace: "team", Name: "v", Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1}, Scheduled: s.Now.Add(time.Second)}}
	status, _ = look(time.Minute)
	g.Expect(status.Ready).To(BeEquivalentTo(1), "the scheduler binds as many")
	status, _ = look(time.Minute)
	g.Expect(status.Unmet).To(BeEquivalentTo(1))
	status, _ = look(-24 * time.Hour)
	g.Expect(status.Ready).To(BeEquivalentTo(1), "the clock was set back")
	s.Nodes[0].Taints = []corev1.Taint{{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule}}
	status, _ = look(time.Hour)
	g.Expect(status.Ready).To(BeEquivalentTo(1), "the node takes no pods")
	_, none, _, _ := review(&pure.Memory{}, attempts, onDemand(nil), s, nil)
	g.Expect(none.Pods).To(BeZero())
	s.Now = s.Now.Add(3 * time.Hour)
	_, _, _, _ = review(&pure.Memory{}, attempts, onDemand(nil), s, nil)
	g.Expect(attempts).To(BeEmpty(), "forgotten")
}

// TestABrokenPodOfANamespace backs off, and not one of another kind that asks for the same. Beyond some kinds all of the namespace do, since a tenant
// can make any number of them.
func TestABrokenPodOfANamespace(t *testing.T) {
	g, attempts := NewWithT(t), demand.Attempts{}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 1)}}
	broken := func(kind string) *corev1.Pod {
		return waits("w"+kind, "3g.20gb", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: kind}}}}
		})
	}
	look := func(pods ...*corev1.Pod) *v1alpha1.OnDemandStatus {
		_, status, _, _ := review(&pure.Memory{}, attempts, onDemand(nil), s, pods)
		return status
	}
	for n := range 4 {
		pod := broken(fmt.Sprint(n))
		g.Expect(look(pod).Ready).To(BeEquivalentTo(1))
		s.Now = s.Now.Add(time.Minute)
		g.Expect(look(pod).Requests[0].Reason).To(Equal(v1alpha1.ReasonAdvertisedNotScheduled))
		want := int32(1)
		if n == 3 {
			want = 0
		}
		g.Expect(look(pod, waits("good", "3g.20gb", nil)).Ready).To(Equal(want), "beside %d kinds of broken pods", n+1)
	}
}

// TestShortPodsDoNotBackOff: a queue of pods that run for a few seconds each. The scheduler binds each, at once; what has finished counts as bound.
func TestShortPodsDoNotBackOff(t *testing.T) {
	g, attempts := NewWithT(t), demand.Attempts{}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 1)}}
	for n := range 30 { // every 5 s another pod has finished, and the next of the queue is to be bound
		var pods []*corev1.Pod
		for at := range 20 {
			pods = append(pods, waits(fmt.Sprintf("w%03d", n+at), "3g.20gb", nil))
		}
		_, status, is, _ := review(&pure.Memory{}, attempts, onDemand(nil), s, pods)
		g.Expect(status.Ready).To(BeEquivalentTo(2), "after %s: %s", s.Now.Sub(now), is.Message)
		s.Now = s.Now.Add(5 * time.Second)
		for i := range s.Nodes[0].GPU.Status.Devices[0].Instances {
			s.Nodes[0].GPU.Status.Devices[0].Instances[i].LastHeldTime = metav1.NewTime(s.Now)
		}
	}
}

// TestAPulsePastTheBackOff: a tenant deletes the pods that the scheduler never binds before a minute is over, and makes them anew some seconds later.
func TestAPulsePastTheBackOff(t *testing.T) {
	g, attempts := NewWithT(t), demand.Attempts{}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 1)}}
	reasons := map[string]int{}
	for n := range 60 { // an hour, of which no pod of the tenant is ever bound
		_, status, _, _ := review(&pure.Memory{}, attempts, onDemand(nil), s, []*corev1.Pod{waits(fmt.Sprint("w", n), "3g.20gb", nil)})
		reasons[status.Requests[0].Reason]++
		s.Now = s.Now.Add(55 * time.Second)
		_, _, _, _ = review(&pure.Memory{}, attempts, onDemand(nil), s, nil)
		s.Now = s.Now.Add(5 * time.Second)
	}
	g.Expect(reasons["AdvertisedNotScheduled"]).To(BeNumerically(">", 30), "of 60 minutes: %v", reasons)
}

// applying is onDemand in mode Apply, with profiles 1g and 7g.
func applying() *v1alpha1.GPUSharingPolicy {
	return onDemand(func(of *v1alpha1.MIGOnDemand) {
		of.Mode, of.Profiles = v1alpha1.OnDemandModeApply, []v1alpha1.MIGProfile{"1g", "7g"}
	})
}

// rests says of a node that it was asked for what it has, and reached it.
func rests(n *cluster.Node) {
	n.GPU.Spec.Devices = nil
	for _, d := range plan.Devices(n.GPU.Status.Devices) {
		n.GPU.Spec.Devices = append(n.GPU.Spec.Devices, v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: plan.Observed(d)})
	}
	n.GPU.Status.Rollout.LastGood = &v1alpha1.NodeSharing{Devices: n.GPU.Spec.Devices}
}

// TestTheClockWasSetBack after a change was decided: the GPU is held for pure.Hold, and not until the time at which it was.
func TestTheClockWasSetBack(t *testing.T) {
	g, n := NewWithT(t), a100s(t, "a", 1)
	rests(&n)
	n.GPU.Status.Demand = []v1alpha1.GPUDemand{{
		UUID: "a-0", Instances: []v1alpha1.InstanceCount{{Profile: "3g.20gb", Count: 2}}, FirstPod: "team/v", SinceTime: metav1.NewTime(now.AddDate(1, 0, 0)),
	}}
	s := &cluster.Snapshot{Now: now.Add(time.Hour), Nodes: []cluster.Node{n}}
	decided, _, _, _ := review(&pure.Memory{}, demand.Attempts{}, applying(), s, nil)
	s.Now, s.Nodes[0].GPU.Status.Demand = s.Now.Add(pure.Hold), decided["a"]
	_, status, is, _ := review(&pure.Memory{}, demand.Attempts{}, applying(), s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
	g.Expect(status.Planned).To(BeEquivalentTo(1), is.Message)
}

// TestEntriesKeepTheirOrder, in whichever GPUs are changed, so that none is written twice.
func TestEntriesKeepTheirOrder(t *testing.T) {
	g, n := NewWithT(t), a100s(t, "a", 2)
	rests(&n)
	n.GPU.Status.Demand = []v1alpha1.GPUDemand{{
		UUID: "a-1", Instances: []v1alpha1.InstanceCount{{Profile: "3g.20gb", Count: 2}}, FirstPod: "team/v", SinceTime: metav1.NewTime(now),
	}}
	n.GPU.Spec.ChangeTime = metav1.NewTime(now)
	decided, _, _, _ := review(&pure.Memory{}, demand.Attempts{}, applying(), &cluster.Snapshot{Now: now, Nodes: []cluster.Node{n}}, []*corev1.Pod{waits("w", "7g.40gb", nil)})
	g.Expect(decided["a"]).To(HaveExactElements(HaveField("UUID", "a-0"), HaveField("UUID", "a-1")))
}

// TestAPodOfTheSameNameAsOneThatEnded, of a StatefulSet say, may be given an idle instance while the agent still reports what the one before it had.
func TestAPodOfTheSameNameAsOneThatEnded(t *testing.T) {
	g, n := NewWithT(t), a100s(t, "a", 2)
	of := plan.Devices(n.GPU.Status.Devices)
	of[1].State.Instances = []gpu.Instance{{Profile: "7g.40gb", ID: 3, UUID: "MIG-3", Placement: gpu.Placement{Size: 8}}}
	n.GPU.Status.Devices = plan.Reported(of)
	id := int32(3)
	n.GPU.Status.Devices[1].Holders = []v1alpha1.HolderStatus{{Namespace: "team", PodName: "web-0", ContainerName: "c", Instance: &id}}
	for i := range n.GPU.Status.Devices[0].Instances {
		n.GPU.Status.Devices[0].Instances[i].LastHeldTime = metav1.NewTime(now.Add(-time.Hour))
	}
	rests(&n)
	n.Pods = []cluster.Pod{{Namespace: "team", Name: "web-0", UID: "new", GPU: true, Scheduled: now, Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 2}}}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{n}}
	decided, status, is, _ := review(&pure.Memory{}, demand.Attempts{}, applying(), s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
	g.Expect(status.Planned).To(BeZero(), "%s: %v", is.Message, decided)
}

// TestWhatTheRolloutHoldsBack for hours is not decided, dropped and announced to the pod again and again.
func TestWhatTheRolloutHoldsBack(t *testing.T) {
	for _, whole := range []bool{false, true} { // of its GPU: with all of its instances it is as it rests
		g, n := NewWithT(t), a100s(t, "a", 1)
		if of := plan.Devices(n.GPU.Status.Devices); !whole {
			of[0].State.Instances = of[0].State.Instances[:1]
			n.GPU.Status.Devices = plan.Reported(of)
		}
		rests(&n)
		s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{n}}
		writes, told, attempts := 0, 0, demand.Attempts{}
		for range 3 * 12 * 60 { // hours, as with a closed window
			before := s.Nodes[0].GPU.Status.Demand
			decided, _, _, _ := review(&pure.Memory{}, attempts, applying(), s, []*corev1.Pod{waits("w", "1g.5gb", nil)})
			if !equality.Semantic.DeepEqual(before, decided["a"]) {
				writes++
				if len(decided["a"]) > 0 && decided["a"][0].FirstPod != "" {
					told++
				}
			}
			s.Nodes[0].GPU.Status.Demand = decided["a"]
			s.Now = s.Now.Add(5 * time.Second)
		}
		g.Expect(writes).To(BeNumerically("<=", 20), "writes of status.demand in three hours without news; Events on the pod: %d", told)
	}
}

// TestAPodThatGrowsOldGoesFirst, though it costs more: what is reported changes with the time alone.
func TestAPodThatGrowsOldGoesFirst(t *testing.T) {
	policy := onDemand(func(of *v1alpha1.MIGOnDemand) { of.Profiles = []v1alpha1.MIGProfile{"1g", "7g"} })
	pods := []*corev1.Pod{waits("young", "1g.5gb", nil), waits("old", "7g.40gb", func(p *corev1.Pod) {
		p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-9 * time.Minute))
	})}
	for after, want := range map[time.Duration][]int32{0: {0, 1}, time.Minute: {1, 0}} {
		_, got, _, _ := review(&pure.Memory{}, demand.Attempts{}, policy, &cluster.Snapshot{Now: now.Add(after), Nodes: []cluster.Node{a100s(t, "a", 1)}}, pods)
		NewWithT(t).Expect([]int32{got.Requests[0].Planned, got.Requests[1].Planned}).To(Equal(want), after.String())
		NewWithT(t).Expect(got.Requests[0].FirstPod).To(Equal("team/old"))
	}
}

// TestAChangeThatNeverBegan holds its GPU for its back-off, and not for pure.Hold as if it had been changed.
func TestAChangeThatNeverBegan(t *testing.T) {
	g, n := NewWithT(t), a100s(t, "a", 1)
	rests(&n)
	n.GPU.Spec.ChangeTime = metav1.NewTime(now.Add(-time.Hour))
	n.GPU.Status.Demand = []v1alpha1.GPUDemand{{
		UUID: "a-0", Instances: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}, FirstPod: "team/v", SinceTime: metav1.NewTime(now.Add(-25 * time.Second)),
	}}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{n}}
	for _, want := range []int32{1, 0} {
		decided, status, is, _ := review(&pure.Memory{}, demand.Attempts{}, applying(), s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
		g.Expect(status.Unmet).To(Equal(want), is.Message)
		s.Nodes[0].GPU.Status.Demand, s.Now = decided["a"], s.Now.Add(time.Minute)
	}
}

// TestAYoungPodBesideAnOldOne of its namespace is young all the same: another namespace's pod that has waited longer than it goes first.
func TestAYoungPodBesideAnOldOne(t *testing.T) {
	g, since := NewWithT(t), func(d time.Duration, namespace string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Namespace, p.Status.Conditions[0].LastTransitionTime = namespace, metav1.NewTime(now.Add(-d))
		}
	}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a100s(t, "a", 2)}}
	pods := []*corev1.Pod{
		waits("old", "7g.40gb", since(11*time.Minute, "team")), waits("young", "7g.40gb", since(time.Second, "team")), waits("w", "7g.40gb", since(9*time.Minute, "other")),
	}
	_, status, _, _ := review(&pure.Memory{}, demand.Attempts{}, onDemand(func(of *v1alpha1.MIGOnDemand) { of.Profiles = []v1alpha1.MIGProfile{"7g"} }), s, pods)
	for _, r := range status.Requests {
		planned := int32(1)
		if r.FirstPod == "team/young" {
			planned = 0
		}
		g.Expect(r.Planned).To(Equal(planned), r.FirstPod)
	}
}

// TestWhatAPodHadThatHasEnded is the scheduler's to give before the agent reports it: nothing is made for who waits for it, and nothing destroys it. An
// instance that a new pod is already reported to hold is counted once.
func TestWhatAPodHadThatHasEnded(t *testing.T) {
	for name, pods := range map[string][]cluster.Pod{
		"it is gone":   nil,
		"another came": {{Namespace: "other", Name: "h2", GPU: true, Scheduled: now, Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			g, n := NewWithT(t), a100s(t, "a", 1)
			n.GPU.Status.Devices[0].Instances[1].LastHeldTime = metav1.Time{}
			n.GPU.Status.Devices[0].Holders = []v1alpha1.HolderStatus{{Namespace: "other", PodName: "h2", ContainerName: "c", Instance: new(int32(2))}}
			n.Pods = pods
			rests(&n)
			s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{n}}
			_, status, is, _ := review(&pure.Memory{}, demand.Attempts{}, applying(), s, []*corev1.Pod{waits("w", "3g.20gb", nil), waits("x", "3g.20gb", nil)}[:2-len(pods)])
			g.Expect(status.Unmet).To(BeZero(), is.Message)
			g.Expect(is.Reason).To(Equal(v1alpha1.ReasonInstancesIdle), is.Message)
			_, status, is, _ = review(&pure.Memory{}, demand.Attempts{}, applying(), s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
			g.Expect(status.Planned).To(BeZero(), is.Message)
		})
	}
}

// TestWhatABoundPodMayHave is not destroyed for one that waits: each idle instance here is or may be that of a pod on the node.
func TestWhatABoundPodMayHave(t *testing.T) {
	pod := func(name string, bound time.Duration, instances int64) cluster.Pod {
		return cluster.Pod{Namespace: "team", Name: name, GPU: true, Scheduled: now.Add(-bound), Requests: map[string]int64{"nvidia.com/mig-3g.20gb": instances}}
	}
	for name, c := range map[string]struct {
		holders []string // that are reported, of the instances of one GPU after the other
		pods    []cluster.Pod
	}{
		"two pods came, each of the name of one that ended": {[]string{"", "", "v", "w"}, []cluster.Pod{pod("v", 0, 1), pod("w", 0, 1)}},
		"one of the name of one that ended, and another":    {[]string{"", "", "v", "x"}, []cluster.Pod{pod("v", 0, 1), pod("w", 0, 1), pod("x", time.Hour, 1)}},
		"a pod came when another ended":                     {[]string{"ended", ""}, []cluster.Pod{pod("v", 0, 1)}},
		"an init container has one, which no agent reports": {[]string{"v", ""}, []cluster.Pod{pod("v", time.Hour, 2)}},
	} {
		t.Run(name, func(t *testing.T) {
			n := a100s(t, "a", len(c.holders)/2)
			for at, holder := range c.holders {
				if d := &n.GPU.Status.Devices[at/2]; holder != "" {
					d.Instances[at%2].LastHeldTime = metav1.Time{}
					d.Holders = append(d.Holders, v1alpha1.HolderStatus{Namespace: "team", PodName: holder, ContainerName: "c", Instance: new(int32(at%2 + 1))})
				}
			}
			n.Pods = c.pods
			rests(&n)
			s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{n}}
			decided, status, is, _ := review(&pure.Memory{}, demand.Attempts{}, applying(), s, []*corev1.Pod{waits("z", "1g.5gb", nil)})
			NewWithT(t).Expect(status.Planned).To(BeZero(), "%s: %v", is.Message, decided)
		})
	}
}

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
