// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// The rules of Cluster Autoscaler, as kubernetes/autoscaler cluster-autoscaler-1.36.1 has them below
// cluster-autoscaler/. They know nothing of the operator. Its advice is checked against them.

// caNode is a node as Cluster Autoscaler sees it.
type caNode struct {
	labels      map[string]string
	allocatable map[string]int64
	readyFor    time.Duration
	requested   map[string]int64
	cpu         float64 // requested, of allocatable
}

// gpuResources are the names that it knows. Source: utils/gpu/gpu.go.
var gpuResources = []string{"nvidia.com/gpu", "habana.ai/gaudi", "gpu.intel.com/xe", "amd.com/gpu", "microsoft.com/directx"}

// hasLabel reports whether a node has the GPU label of a cloud provider. Source: GPULabel of cloudprovider/*.
func (n caNode) hasLabel() bool {
	for _, label := range []string{
		"cluster-api/accelerator", "k8s.amazonaws.com/accelerator", "kubernetes.azure.com/accelerator", "cloud.google.com/gke-accelerator",
	} {
		if _, found := n.labels[label]; found {
			return true
		}
	}
	return false
}

func (n caNode) hasGPU() bool {
	return slices.ContainsFunc(gpuResources, func(name string) bool { return n.allocatable[name] > 0 })
}

// unready reports whether a node that the kubelet reports as ready is replaced by a copy that is not. Source:
// processors/customresources/gpu_processor.go, FilterOutNodesWithUnreadyResources.
func (n caNode) unready() bool { return n.hasLabel() && !n.hasGPU() }

// utilization decides whether a node may be scaled down. Source: simulator/utilization/info.go, Calculate.
func (n caNode) utilization() float64 {
	if n.hasLabel() || n.allocatable["nvidia.com/gpu"] > 0 {
		if n.allocatable["nvidia.com/gpu"] == 0 {
			return 0
		}
		return float64(n.requested["nvidia.com/gpu"]) / float64(n.allocatable["nvidia.com/gpu"])
	}
	return n.cpu
}

// caGroup is a node group as Cluster Autoscaler sees it.
type caGroup struct {
	nodes  []caNode
	cached *caNode // the last node that was good
	// announced is the capacity of annotations or tags, and of the instance type below these.
	announced map[string]int64
}

// template is what a new node of the group is taken to have. Source:
// processors/nodeinfosprovider/mixed_nodeinfos_processor.go, Process.
func (g *caGroup) template() map[string]int64 {
	for i := range g.nodes {
		if n := &g.nodes[i]; !n.unready() && n.readyFor > time.Minute {
			g.cached = n
			return n.allocatable
		}
	}
	if g.cached != nil {
		return g.cached.allocatable
	}
	return g.announced
}

// announcedBy is what annotations announce. gpu-type is any resource in Cluster API; OpenShift ignores it. Sources:
// cloudprovider/clusterapi/clusterapi_unstructured.go, InstanceCapacity; openshift/kubernetes-autoscaler
// cloudprovider/openshift/openshift_unstructured.go.
func announcedBy(s autoscaling.Scalable) (capacity map[string]int64, hasTemplate bool) {
	count, found := s.Annotations[autoscaling.AnnotationGPUCount]
	if !found {
		return map[string]int64{}, true
	}
	n, err := strconv.ParseInt(count, 10, 64)
	if err != nil {
		return nil, false
	}
	name := s.Annotations[autoscaling.AnnotationGPUType]
	if s.Group == autoscaling.GroupOpenShift {
		name = "nvidia.com/gpu"
	}
	if n == 0 || name == "" {
		return map[string]int64{}, true
	}
	return map[string]int64{name: n}, true
}

// TestAdviceAgainstClusterAutoscaler: for each way of sharing, on each platform, with and without the GPU label, what
// the operator writes makes an empty group scale up for the pods that ask for it, or the operator reports why not; and
// each trap of the rules above is reported exactly where it is one.
func TestAdviceAgainstClusterAutoscaler(t *testing.T) {
	for name, spec := range map[string]string{
		"renamed": renamed, "unrenamed": unrenamed, "mps": mps, "filled": filled, "single": single, "layout": layout,
	} {
		for _, group := range []string{autoscaling.GroupClusterAPI, autoscaling.GroupOpenShift} {
			for _, label := range []string{"", "cluster-api/accelerator"} {
				t.Run(name+" "+group+" "+label, func(t *testing.T) { againstRules(t, spec, group, label) })
			}
		}
	}
}

func againstRules(t *testing.T, spec, platform, label string) {
	t.Helper()
	g := NewWithT(t)
	snapshot := scalable(t, platform, spec, nil)
	s := &snapshot.Scalables[0]
	if label != "" {
		s.Labels[label] = "a100"
	}
	for _, write := range snapshot.Advise().Writes {
		apply(t, s, write.Annotate)
	}
	empty := only(t, snapshot)
	announced, hasTemplate := announcedBy(*s)
	g.Expect(hasTemplate).To(BeTrue())
	ca := &caGroup{announced: announced}

	// Each resource that the template lacks starts no node.
	lacks := false
	for resource, count := range offers(empty) {
		if has := ca.template()[resource]; has != count {
			lacks = true
			g.Expect(has).To(BeZero(), "a wrong count is worse than none")
		}
	}
	for resource := range ca.template() {
		g.Expect(offers(empty)).To(HaveKey(resource), "nothing is announced that no node will have")
	}
	g.Expect(lacks).To(Equal(reports(empty, v1alpha1.ReasonResourceNotSupported) || reports(empty, v1alpha1.ReasonMultipleResources)), empty.Message)

	// A node comes and is ready.
	live := node("a", a100, 1, map[string]string{"pool": "gpu"})
	if label != "" {
		live.Labels[label] = "a100"
	}
	live.Allocatable = offers(empty)
	live.Annotations = map[string]string{"machine.openshift.io/machine": "ns/machine"}
	if platform == autoscaling.GroupClusterAPI {
		live.Annotations = map[string]string{"cluster.x-k8s.io/owner-kind": "MachineSet", "cluster.x-k8s.io/owner-name": "set", "cluster.x-k8s.io/cluster-namespace": "ns"}
	}
	snapshot.MachineSets, snapshot.Nodes = map[string]string{"ns/machine": "ns/set"}, []cluster.Node{live}
	one := only(t, snapshot)
	g.Expect(one.Nodes).To(BeEquivalentTo(1))
	full := caNode{labels: live.Labels, allocatable: live.Allocatable, requested: live.Allocatable, readyFor: time.Hour}
	g.Expect(full.unready()).To(Equal(reports(one, v1alpha1.ReasonAcceleratorLabel)), one.Message)
	g.Expect(full.utilization() < 0.5).To(Equal(reports(one, v1alpha1.ReasonScaleDownCandidate)), one.Message)
	ca.nodes = []caNode{full}
	template := ca.template()
	if !full.unready() {
		g.Expect(template).To(Equal(offers(one)), "from one node on the group scales by itself")
	}

	// The group is empty again, and the policy changes.
	ca.nodes, snapshot.Nodes = nil, nil
	snapshot.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{one.NodeGroupStatus}
	again := only(t, snapshot)
	g.Expect(reports(again, v1alpha1.ReasonStaleTemplate)).To(BeFalse(), again.Message)
	snapshot.Policies[0].Spec.Sharing = policy(t, "x", "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 3}}").Spec.Sharing
	changed := only(t, snapshot)
	stale := ca.cached != nil && !maps.Equal(ca.template(), offers(changed))
	g.Expect(reports(changed, v1alpha1.ReasonStaleTemplate)).To(Equal(stale), changed.Message)
}

// reports is whether a group reports a reason, first or beside another.
func reports(g autoscaling.Group, reason string) bool {
	return g.Reason == reason || slices.Contains(reasonsIn(g.Message), reason)
}

func reasonsIn(message string) []string {
	var all []string
	for _, reason := range []string{
		v1alpha1.ReasonResourceNotSupported, v1alpha1.ReasonMultipleResources, v1alpha1.ReasonAcceleratorLabel, v1alpha1.ReasonScaleDownCandidate,
		v1alpha1.ReasonStaleTemplate, v1alpha1.ReasonStartupGap,
	} {
		if strings.Contains(message, reason+": ") {
			all = append(all, reason)
		}
	}
	return all
}
