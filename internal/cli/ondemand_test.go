// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// advised is a policy that reports what pods wait for.
func advised() v1alpha1.GPUSharingPolicy {
	p := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}}
	p.Spec.Sharing = v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{Layouts: []v1alpha1.MIGLayout{{
		Fill: "3g", OnDemand: &v1alpha1.MIGOnDemand{Profiles: []v1alpha1.MIGProfile{"1g"}},
	}}}}
	p.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionDemandMet, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNoIdleRoom}}
	p.Status.OnDemand = &v1alpha1.OnDemandStatus{
		Pods: 6, Ready: 1, Planned: 2, Unmet: 3, GPUs: 2,
		Requests: []v1alpha1.DemandStatus{
			{Instances: []v1alpha1.InstanceRequest{{Profile: "1g.5gb+me", Count: 1}}, Pods: 3, FirstPod: "team/a", Ready: 1, Planned: 2},
			{
				Instances: []v1alpha1.InstanceRequest{{Profile: "7g.40gb", Count: 2}}, Pods: 3, FirstPod: "team/b", Unmet: 3,
				Reason: v1alpha1.ReasonNoIdleRoom, Holders: []string{"other/x"},
			},
		},
		Changes: []v1alpha1.OnDemandChange{{
			NodeName: "n1", Index: 3, Destroy: []v1alpha1.InstanceCount{{Profile: "3g.20gb", Count: 1}}, Create: []v1alpha1.InstanceCount{{Profile: "1g.5gb+me", Count: 2}},
		}},
	}
	return p
}

const (
	toStart = "3 pods for nvidia.com/mig-1g.5gb.me: 1, team/a first: for 1 instances are idle, so it is the scheduler's turn; 2 would start after the change below"
	inVain  = "3 pods for nvidia.com/mig-7g.40gb: 2, team/b first: for 3 nothing can be done (NoIdleRoom): instances are held by other/x. " +
		"Wait until pods end (`status.onDemand.requests[].holders`), or add nodes"
	idleSoon = "3 pods for nvidia.com/mig-7g.40gb: 2, team/b first: for 3 nothing can be done (IdleTooShort): instances are idle for long enough at " +
		"12:04:05 UTC. Wait (`status.onDemand.requests[].untilTime`), or lower `onDemand.idleSeconds`"
	changes = "would change GPU 3 of node n1: destroy the idle 1 × 3g.20gb, create 2 × 1g.5gb+me"
)

// TestStatusSaysWhatPodsWaitFor, what would be changed for them, and why not.
func TestStatusSaysWhatPodsWaitFor(t *testing.T) {
	unreported, served, unknown, static, soon := advised(), advised(), advised(), advised(), advised()
	unreported.Status = v1alpha1.GPUSharingPolicyStatus{}
	served.Status.OnDemand = &v1alpha1.OnDemandStatus{}
	served.Status.Conditions[0].Status = metav1.ConditionTrue
	unknown.Status.OnDemand, unknown.Status.Conditions[0].Status, unknown.Status.Conditions[0].Message = nil, metav1.ConditionUnknown, "No pod counts"
	soon.Status.OnDemand.Requests = soon.Status.OnDemand.Requests[1:]
	soon.Status.OnDemand.Requests[0].Reason, soon.Status.OnDemand.Requests[0].Holders = v1alpha1.ReasonIdleTooShort, nil
	soon.Status.OnDemand.Requests[0].UntilTime = metav1.NewTime(time.Date(2026, 11, 26, 12, 4, 5, 0, time.UTC))
	static.Spec.Sharing.MIG.Layouts[0].OnDemand, static.Status = nil, v1alpha1.GPUSharingPolicyStatus{}
	applied, left := advised(), advised()
	applied.Spec.Sharing.MIG.Layouts[0].OnDemand.Mode = v1alpha1.OnDemandModeApply
	left.Status.OnDemand.Requests, left.Status.OnDemand.Changes, left.Status.OnDemand.GPUs = left.Status.OnDemand.Requests[1:], nil, 0
	left.Status.OnDemand.Requests[0].Reason, left.Status.OnDemand.Requests[0].Holders = v1alpha1.ReasonAdvertisedNotScheduled, nil
	left.Status.OnDemand.Requests[0].UntilTime = soon.Status.OnDemand.Requests[0].UntilTime
	for name, c := range map[string]struct {
		policy v1alpha1.GPUSharingPolicy
		want   []string
	}{
		"pods wait":     {advised(), []string{toStart, inVain, changes, "and 1 GPU more", "mode Advise changes nothing"}},
		"they are made": {applied, []string{toStart, inVain, strings.TrimPrefix(strings.Replace(changes, "change", "changes", 1), "would "), "and 1 GPU more"}},
		"the scheduler leaves them": {left, []string{"3 pods for nvidia.com/mig-7g.40gb: 2, team/b first: for 3 nothing can be done (AdvertisedNotScheduled): the scheduler " +
			"left instances idle; next attempt at 12:04:05 UTC. Mend what `kubectl describe pod` says, or delete the pods; `kubectl gpusharing status` says when the next attempt is"}},
		"nobody waits":             {served, nil},
		"instances are idle soon":  {soon, []string{idleSoon, changes, "and 1 GPU more", "mode Advise changes nothing"}},
		"a selector that is none":  {unknown, []string{"No pod counts"}},
		"without the feature gate": {unreported, []string{"not reported: the controller runs without the feature gate OnDemandMIG (chart: featureGates.OnDemandMIG=true)"}},
		"a static layout":          {static, nil},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			g.Expect(onDemandOf(&c.policy)).To(Equal(c.want))
			var shown text
			shown.status(cluster.Snapshot{Policies: []v1alpha1.GPUSharingPolicy{c.policy}}, query{})
			for _, line := range c.want {
				g.Expect(shown.String()).To(ContainSubstring("research: on demand: " + line + "\n"))
			}
		})
	}
}

// TestStatusSaysWhatGPUsHaveOnDemand, what at rest, and for whom.
func TestStatusSaysWhatGPUsHaveOnDemand(t *testing.T) {
	g, p := NewWithT(t), advised()
	p.OnDemand().IdleSeconds = 300
	d, _ := catalogue.Find("NVIDIA-A100-SXM4-40GB")
	d.UUID, d.Index, d.MIGCapable, d.PendingMIG = "GPU-5", 5, true, true
	d.State = gpu.State{MIG: true, Instances: []gpu.Instance{{Profile: "7g.40gb", UUID: "MIG-1", Placement: gpu.Placement{Size: 8}}}}
	n := cluster.Node{Name: "a"}
	n.GPU.Name, n.GPU.Spec.PolicyName, n.GPU.Status.Devices = "a", "research", plan.Reported([]gpu.Device{d})
	e := v1alpha1.GPUDemand{
		UUID: "GPU-5", FirstPod: "team/a", SinceTime: metav1.NewTime(time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)),
		Instances: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}},
	}
	said := func(nodes int) []string {
		n.GPU.Status.Demand = []v1alpha1.GPUDemand{e}
		return madeOnDemand(&p, slices.Repeat([]report{{node: &n}}, nodes))
	}
	g.Expect(said(1)).To(Equal([]string{"on demand: GPU 5 of node a has 1 × 7g.40gb, at rest 2 × 3g.20gb (unused for 15m); since 12:00:00 UTC for team/a"}))
	e.Instances, e.FirstPod, e.Failures = []v1alpha1.InstanceCount{{Profile: "3g.20gb", Count: 2}}, "", 2
	g.Expect(said(1)).To(Equal([]string{"on demand: GPU 5 of node a has 1 × 7g.40gb and is to have 2 × 3g.20gb, at rest 2 × 3g.20gb (unused for 15m); 2 changes failed"}))
	g.Expect(said(12)).To(And(HaveLen(11), ContainElement("on demand: and 2 GPUs more")))
	n.GPU.Spec.PolicyName = "other"
	g.Expect(said(1)).To(BeEmpty())
}

// TestWhySaysWhatWouldBeChangedForAPod, and of no other pods.
func TestWhySaysWhatWouldBeChangedForAPod(t *testing.T) {
	for name, c := range map[string]struct {
		asks []corev1.ResourceName
		want []string
	}{
		"as many":                    {[]corev1.ResourceName{"nvidia.com/mig-1g.5gb.me"}, []string{"policy research: " + toStart, changes, "and 1 GPU more", "mode Advise changes nothing"}},
		"those of another namespace": {[]corev1.ResourceName{"nvidia.com/mig-1g.5gb.me", ""}, nil},
		"others ask for two":         {[]corev1.ResourceName{"nvidia.com/mig-7g.40gb"}, nil},
		"others ask for one alone":   {[]corev1.ResourceName{"nvidia.com/mig-1g.5gb.me", "nvidia.com/mig-2g.10gb"}, nil},
	} {
		want := c.want
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "a"}}
			limits := corev1.ResourceList{}
			for _, name := range c.asks {
				if limits[name] = resource.MustParse("1"); name == "" {
					delete(limits, name)
					pod.Namespace = "other"
				}
			}
			pod.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: limits}}}
			said := whyOf(inquiry{namespace: pod.Namespace, pod: pod, snapshot: cluster.Snapshot{Policies: []v1alpha1.GPUSharingPolicy{advised()}}})
			g.Expect(said.OnDemand).To(Equal(want))
			var shown text
			shown.why(&said)
			for _, line := range want {
				g.Expect(shown.String()).To(ContainSubstring(line))
			}
		})
	}
}
