// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

const untilReady = "\nrollout: {startupTaint: UntilReady}"

// tolerated: NVIDIA's programs and Node Feature Discovery tolerate the startup taint.
func tolerated(s *autoscaling.Snapshot) {
	s.Policies[0].Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionTainted, Status: metav1.ConditionTrue}}
	s.Discovery = [][]corev1.Toleration{{{Key: v1alpha1.TaintStartupAutoscaler, Operator: corev1.TolerationOpExists}}}
}

// joined lets a node without a GPU label join MachineSet ns/set of Cluster API.
func joined(s *autoscaling.Snapshot, age time.Duration, taints ...corev1.Taint) {
	n := ofClusterAPI(nil)
	n.Name, n.Created, n.Taints, n.Allocatable = "new", s.Now.Add(-age), taints, nil
	s.Starting = []cluster.Node{n}
	s.Policies[0].CreationTimestamp = metav1.NewTime(s.Now.Add(-time.Hour))
}

var early = corev1.Taint{Key: v1alpha1.TaintStartupAutoscaler, Value: autoscaling.Unlabelled, Effect: corev1.TaintEffectNoSchedule}

// startups are the nodes that get the startup taint, or lose it.
func startups(s autoscaling.Snapshot) map[string]bool {
	all := map[string]bool{}
	for _, write := range s.Advise().Writes {
		if write.Startup != nil {
			all[write.Startup.Node] = write.Startup.On
		}
	}
	return all
}

// A node that tells its group has the taint before it has a label of its GPUs: Cluster Autoscaler started three nodes for one pod meanwhile.
func TestANodeHasTheStartupTaintOnceItTellsItsGroup(t *testing.T) {
	for name, c := range map[string]struct {
		edit func(*autoscaling.Snapshot)
		want map[string]bool
	}{
		"it joins": {want: map[string]bool{"new": true}},
		"a node of a group of the cloud": {func(s *autoscaling.Snapshot) {
			s.Starting[0].Annotations, s.Starting[0].Labels = nil, map[string]string{"eks.amazonaws.com/nodegroup": "gpu"}
			s.Policies[0].Spec.Autoscaling.NodeShapes[0].NodeGroups = []v1alpha1.NodeGroupReference{{Kind: v1alpha1.NodeGroupEKS, Name: "gpu"}}
		}, map[string]bool{"new": true}},
		"it has the taint": {edit: func(s *autoscaling.Snapshot) { s.Starting[0].Taints = []corev1.Taint{early} }},
		"its kubelet registered it with the taint": {edit: func(s *autoscaling.Snapshot) {
			s.Starting[0].Taints = []corev1.Taint{{Key: v1alpha1.TaintStartupAutoscaler, Effect: corev1.TaintEffectNoSchedule}}
		}},
		"no policy asks for the taint":          {edit: func(s *autoscaling.Snapshot) { s.Policies[0].Spec.Rollout.StartupTaint = v1alpha1.StartupTaintNone }},
		"the rollout is paused":                 {edit: func(s *autoscaling.Snapshot) { s.Policies[0].Spec.Rollout.Paused = true }},
		"it tells no group":                     {edit: func(s *autoscaling.Snapshot) { s.Starting[0].Annotations = nil }},
		"its group is one that nobody declares": {edit: func(s *autoscaling.Snapshot) { s.Starting[0].Annotations["cluster.x-k8s.io/owner-name"] = "cpu" }},
		"it was there before the policy":        {edit: func(s *autoscaling.Snapshot) { s.Policies[0].CreationTimestamp = metav1.NewTime(s.Now) }},
		"it offers GPUs already":                {edit: func(s *autoscaling.Snapshot) { s.Starting[0].Allocatable = map[string]int64{"nvidia.com/gpu": 1} }},
		"NVIDIA's programs do not tolerate it":  {edit: func(s *autoscaling.Snapshot) { s.Policies[0].Status.Conditions[0].Status = metav1.ConditionFalse }},
		"Node Feature Discovery does not":       {edit: func(s *autoscaling.Snapshot) { s.Discovery = append(s.Discovery, nil) }},
		"nobody knows whether it does":          {edit: func(s *autoscaling.Snapshot) { s.Discovery = nil }},
		"no label came": {func(s *autoscaling.Snapshot) {
			s.Starting[0].Taints, s.Starting[0].Created = []corev1.Taint{early}, s.Now.Add(-5*time.Minute)
		}, map[string]bool{"new": false}},
		"the policy goes": {func(s *autoscaling.Snapshot) { s.Starting[0].Taints, s.Policies = []corev1.Taint{early}, nil }, map[string]bool{"new": false}},
		"the taint of a user, no label": {edit: func(s *autoscaling.Snapshot) {
			s.Starting[0].Taints, s.Policies = []corev1.Taint{{Key: v1alpha1.TaintStartupAutoscaler, Effect: corev1.TaintEffectNoSchedule}}, nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			s := scalable(t, autoscaling.GroupClusterAPI, renamed+untilReady, nil)
			tolerated(&s)
			joined(&s, 10*time.Second)
			if c.edit != nil {
				c.edit(&s)
			}
			if c.want == nil {
				c.want = map[string]bool{}
			}
			g.Expect(startups(s)).To(Equal(c.want))
		})
	}
}

// The wait for the label has an end, at which the group says what went wrong.
func TestANodeWithoutAGPULabelIsReported(t *testing.T) {
	g := NewWithT(t)
	s := scalable(t, autoscaling.GroupClusterAPI, renamed+untilReady, nil)
	tolerated(&s)
	joined(&s, time.Minute, early)
	g.Expect(s.Advise().After).To(Equal(4 * time.Minute))
	g.Expect(only(t, s).Message).NotTo(ContainSubstring("Node new"))
	joined(&s, 5*time.Minute, early)
	g.Expect(only(t, s).Message).To(ContainSubstring("Node new has got no label nvidia.com/gpu.present within 5m0s, so it takes pods"))
}

// Which nodes the controller has to look at.
func TestNodesThatStart(t *testing.T) {
	g := NewWithT(t)
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(now.Add(-time.Minute)), Annotations: map[string]string{"cluster.x-k8s.io/machine": "gpu-1"}}}
	g.Expect(autoscaling.Starts(&n, now)).To(BeTrue())
	g.Expect(autoscaling.Starts(&n, now.Add(time.Hour))).To(BeFalse(), "one that has run for long")
	n.Spec.Taints = []corev1.Taint{early}
	g.Expect(autoscaling.Starts(&n, now.Add(time.Hour))).To(BeTrue(), "the taint must go")
	n.Spec.Taints, n.Labels = nil, map[string]string{"karpenter.sh/nodepool": "gpu"}
	g.Expect(autoscaling.Starts(&n, now)).To(BeFalse(), "Karpenter would start node after node")

	s := autoscaling.Snapshot{}
	needed := func() bool { return s.NeedsNodes([]corev1.Node{n}) }
	g.Expect(needed()).To(BeFalse(), "no policy")
	s.Policies = make([]v1alpha1.GPUSharingPolicy, 1)
	g.Expect(needed()).To(BeTrue())
	n.Labels = nil
	g.Expect(needed()).To(BeFalse(), "no node group")
	s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{{Kind: v1alpha1.NodeGroupEKS, Name: "gpu"}}
	g.Expect(needed()).To(BeTrue())
	s.Policies, n.Spec.Taints = nil, []corev1.Taint{early}
	g.Expect(needed()).To(BeTrue())
}
