// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// partitioned is a cluster of one node that a policy has partitioned, with NVIDIA's mig-manager kept off it.
func partitioned() (*cluster, *host) {
	c, h := toMIG()
	h.Labels[v1alpha1.LabelMIGManager] = "true"
	h.Labels["nvidia.com/mig.config"] = "all-disabled"
	c.run(60)
	return c, h
}

func TestAMIGManagerThatSomebodyLetsBackIsOverruledOnceInAnHour(t *testing.T) {
	g := NewWithT(t)
	c, h := partitioned()
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"))
	lets := func() rollout.NodeState {
		h.Labels[v1alpha1.LabelMIGManager] = "true"
		c.steps(3)
		return rollout.Decide(c.world()).Nodes[0]
	}
	g.Expect(lets().Reason).To(Equal(v1alpha1.ReasonReady))
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"), "everybody is overruled once")

	n := lets()
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("true"), "it is not fought over")
	g.Expect(n.Reason).To(Equal(v1alpha1.ReasonMIGManagerUnfenced))
	g.Expect(n.State).To(Equal(rollout.StateUpToDate), "what is advertised is as wished")
	g.Expect(n.Message).To(ContainSubstring("it is set back to false at 09:"))
	d := rollout.Decide(c.world())
	g.Expect(d.After).To(BeNumerically("~", time.Hour, time.Minute))
	g.Expect(d.Policies["research"].Pending[0].Reason).To(Equal(v1alpha1.ReasonMIGManagerUnfenced))

	c.tick(d.After)
	c.steps(2)
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"), "after an hour again")

	c.Policies = nil
	c.run(60)
	g.Expect(h.Annotations).To(BeEmpty())
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("true"))
}

func TestALayoutForAMIGManagerThatIsNotThereIsTold(t *testing.T) {
	g := NewWithT(t)
	c, h := partitioned()
	h.Labels["nvidia.com/mig.config"] = "all-1g.5gb"
	d := rollout.Decide(c.world())
	g.Expect(d.Actions).To(BeEmpty())
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonMIGConfigIgnored))
	g.Expect(d.Nodes[0].Message).To(ContainSubstring(`somebody set nvidia.com/mig.config=all-1g.5gb (it was "all-disabled" before the operator)`))
	h.Labels["nvidia.com/mig.config"] = "all-disabled"
	g.Expect(rollout.Decide(c.world()).Nodes[0].Reason).To(Equal(v1alpha1.ReasonReady))
}

func TestNodesOfOthersAreLeftAlone(t *testing.T) {
	for name, test := range map[string]struct {
		taken  func(*host)
		reason string
		says   string
	}{
		"the Dynamic Accelerator Slicer": {
			func(h *host) { h.Slicer = "mig.das.com/1g.5gb" }, v1alpha1.ReasonSlicerActive, "the node offers mig.das.com/1g.5gb",
		},
		"NVIDIA's DRA driver": {
			func(h *host) { h.Pods = append(h.Pods, rollout.Pod{Namespace: "dra", Name: "plugin", DRA: true}) },
			v1alpha1.ReasonDRADriverActive, "pod dra/plugin of NVIDIA's DRA driver",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			test.taken(h)
			d := c.pass()
			g.Expect(d.Nodes[0].State).To(Equal(rollout.StateImpossible))
			g.Expect(d.Nodes[0].Reason).To(Equal(test.reason))
			g.Expect(d.Nodes[0].Message).To(ContainSubstring(test.says))
			c.run(10)
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
			g.Expect(h.Annotations).To(BeEmpty())
		})
	}
}

func TestInstancesThatSomebodyKeepsChangingAreLeft(t *testing.T) {
	g := NewWithT(t)
	c, h := partitioned()
	evicting(&c.Policies[0])
	uuid := h.devices()[0].UUID
	id := h.devices()[0].State.Instances[0].ID
	g.Expect(h.hardware.DestroyInstance(t.Context(), uuid, id)).To(Succeed())
	g.Expect(h.hardware.CreateInstance(t.Context(), uuid, "1g.5gb", gpu.Placement{Start: 0, Size: 1})).To(Succeed())
	c.hold(h, "theirs", 0, h.devices()[0].State.Instances[0].ID)
	h.GPU.Status.Conditions = []metav1.Condition{
		{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, ObservedGeneration: h.GPU.Generation, Reason: v1alpha1.ReasonChangedByOthers},
		{
			Type: v1alpha1.ConditionStalled, Status: metav1.ConditionTrue, ObservedGeneration: h.GPU.Generation,
			Reason: v1alpha1.ReasonChangedByOthers, Message: "somebody else keeps changing MIG on GPU 0",
		},
	}
	d := rollout.Decide(c.world())
	g.Expect(d.Actions).To(BeEmpty(), "nobody is kept off or evicted for that")
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateFailed))
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonChangedByOthers))
	g.Expect(d.Nodes[0].Message).To(ContainSubstring("somebody else keeps changing MIG on GPU 0"))
}

func TestOthersAreKnownByWhatTheyPutOnANode(t *testing.T) {
	g := NewWithT(t)
	node := &corev1.Node{Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
		"mig.das.com/2g.10gb": resource.MustParse("3"), "mig.das.com/1g.5gb": resource.MustParse("7"),
		"instaslice.redhat.com/mig-1g.5gb": resource.MustParse("0"), "nvidia.com/gpu": resource.MustParse("1"),
	}}}
	n := rollout.NodeOf(node, &v1alpha1.GPUNode{})
	g.Expect(n.Slicer).To(Equal("mig.das.com/1g.5gb"))
	g.Expect(n.Allocatable).To(Equal(map[string]int64{"nvidia.com/gpu": 1}))

	pod := func(label string, containers ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{label: "kubelet-plugin"}}}
		for _, name := range containers {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: name})
		}
		return p
	}
	g.Expect(rollout.OffersGPUs(pod("nvidia-dra-driver-gpu-component", "compute-domains", "gpus"))).To(BeTrue())
	g.Expect(rollout.OffersGPUs(pod("dra-driver-nvidia-gpu-component", "gpus"))).To(BeTrue())
	g.Expect(rollout.OffersGPUs(pod("nvidia-dra-driver-gpu-component", "compute-domains"))).To(BeFalse(), "compute domains only")
	g.Expect(rollout.OffersGPUs(pod("app", "gpus"))).To(BeFalse())
}
