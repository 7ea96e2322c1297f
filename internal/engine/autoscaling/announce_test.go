// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// A new node of a paused policy advertises whole GPUs until the rollout goes on.
func TestAPausedPolicyAnnouncesNothing(t *testing.T) {
	g := NewWithT(t)
	snapshot := karpenter(t, renamed+declared+"\nrollout: {paused: true}")
	g.Expect(snapshot.Advise().Writes).To(BeEmpty())
	g.Expect(only(t, snapshot).Reason).To(Equal(v1alpha1.ReasonPaused))
	s := scalable(t, autoscaling.GroupClusterAPI, renamed+"\nrollout: {paused: true}", nil)
	g.Expect(s.Advise().Writes).To(BeEmpty())
}

// A policy whose selector was changed away from an empty pool does not govern its new nodes.
func TestAShapeIsNotRememberedForAPolicyThatNoLongerSelectsTheGroup(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+"\nnodeSelector: {matchLabels: {team: a}}\nautoscaling: {mode: Manage}", node("a", t4, 4, inPool("t4.four")))
	s.Pools[0].Labels["team"], s.Nodes[0].Labels["team"] = "a", "a"
	s.Nodes[0].Allocatable = map[string]int64{shared: 40}
	group := only(t, s)
	s.Nodes, s.Policies[0].Status.NodeGroups = nil, []v1alpha1.NodeGroupStatus{group.NodeGroupStatus}
	g.Expect(s.Advise().Writes).To(HaveLen(1))
	s.Policies[0].Spec.NodeSelector.MatchLabels["team"] = "b"
	g.Expect(s.Advise().Writes).To(BeEmpty())
	s.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchExpressions: []v1alpha1.NodeSelectorRequirement{{Key: "team", Operator: "NotIn", Values: []string{"a"}}}}
	g.Expect(s.Advise().Writes).To(BeEmpty())
	s.Policies[0].Spec.NodeSelector = nil
	s.Policies[0].Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{a100}}
	g.Expect(s.Advise().Groups["research"]).To(BeEmpty())
}

// A policy without nodeSelector governs nodes whose GPUs are known.
func TestAmbiguousNodesOfAPolicyWithoutSelector(t *testing.T) {
	g := NewWithT(t)
	a, b := node("a", t4, 1, nil), node("b", a100, 1, nil)
	a.Annotations["machine.openshift.io/machine"], b.Annotations["machine.openshift.io/machine"] = "ns/m-a", "ns/m-b"
	s := autoscaling.Snapshot{
		Now: now, Policies: []v1alpha1.GPUSharingPolicy{policy(t, "research", unrenamed+"\nautoscaling: {mode: Manage}")}, OpenShift: "4.19.3",
		Nodes: []cluster.Node{a, b}, MachineSets: map[string]string{"ns/m-a": "ns/set", "ns/m-b": "ns/set"},
		Scalables: []autoscaling.Scalable{machineSet(autoscaling.GroupOpenShift, nil)},
	}
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonAmbiguousShape))
}

// A controller that removes one annotation and leaves the record is no other than one that removes both.
func TestAToolThatRemovesOneAnnotationIsLeftAlone(t *testing.T) {
	g := NewWithT(t)
	snapshot := scalable(t, autoscaling.GroupOpenShift, unrenamed, nil)
	s := &snapshot.Scalables[0]
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	writes := 0
	for range 20 { // reconciles
		snapshot.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{only(t, snapshot).NodeGroupStatus}
		delete(s.Annotations, autoscaling.AnnotationGPUCount)
		delete(s.Managers, autoscaling.AnnotationGPUCount)
		for _, write := range snapshot.Advise().Writes {
			apply(t, s, write.Annotate)
			writes++
		}
	}
	g.Expect(writes).To(BeNumerically("<=", 1))
	g.Expect(only(t, snapshot).Reason).To(Equal(v1alpha1.ReasonRemovedByOther))
}

// Without the record, what is ours goes: it was not there before.
func TestARecordThatAnotherRemoves(t *testing.T) {
	g := NewWithT(t)
	snapshot := scalable(t, autoscaling.GroupOpenShift, unrenamed, nil)
	s := &snapshot.Scalables[0]
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	delete(s.Annotations, v1alpha1.AnnotationAutoscaling)
	delete(s.Managers, v1alpha1.AnnotationAutoscaling)
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	snapshot.Policies = nil
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	g.Expect(s.Annotations).To(BeEmpty(), "nothing of the operator is left")
}

// A user who saves the operator's NodeOverlay as YAML and applies it owns it.
func TestACopyOfANodeOverlayIsTheUsers(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	o := unstructuredOf(s.Advise().Writes[0].Overlay.Object)
	o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: autoscaling.FieldManager, Operation: metav1.ManagedFieldsOperationApply}})
	ours := autoscaling.OverlayOf(o)
	copied := &unstructured.Unstructured{Object: o.DeepCopy().Object}
	copied.SetName("gpu-sharing-of-mine")
	copied.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: "argocd-controller", Operation: metav1.ManagedFieldsOperationUpdate}})
	s.Overlays = []autoscaling.Overlay{ours, autoscaling.OverlayOf(copied)}
	g.Expect(s.Advise().Writes).To(BeEmpty())
}

// Undoing that is refused is reported too.
func TestAnOverlayThatCannotBeDeletedIsReported(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	o := unstructuredOf(s.Advise().Writes[0].Overlay.Object)
	o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: autoscaling.FieldManager, Operation: metav1.ManagedFieldsOperationApply}})
	s.Overlays = []autoscaling.Overlay{autoscaling.OverlayOf(o)}
	s.Policies[0].Spec.Autoscaling.Mode = v1alpha1.AutoscalingModeAdvise
	g.Expect(s.Advise().Writes[0].Delete).NotTo(BeNil())
	s.Refused = map[string]autoscaling.Refusal{s.Advise().Writes[0].ObjectName(): {Forbidden: true, Message: "forbidden"}}
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonNotPermitted))
}

// A MachineSet that is deleted and created again under its name was never annotated.
func TestAMachineSetThatIsCreatedAgainIsAnnotated(t *testing.T) {
	g := NewWithT(t)
	s := scalable(t, autoscaling.GroupOpenShift, unrenamed, nil)
	apply(t, &s.Scalables[0], s.Advise().Writes[0].Annotate)
	s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{only(t, s).NodeGroupStatus}
	g.Expect(s.Policies[0].Status.NodeGroups[0].Written).NotTo(BeEmpty())
	s.Scalables[0] = machineSet(autoscaling.GroupOpenShift, nil)
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonRemovedByOther), "the same object")
	s.Scalables[0].UID = "set-2"
	g.Expect(s.Advise().Writes[0].Annotate.UID).To(Equal("set-2"))
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonConfiguring))
}

// A tool that deletes what it does not know, such as argocd with prune, is not fought without end.
func TestAToolThatDeletesTheNodeOverlayIsLeftAlone(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	writes := 0
	for range 20 { // reconciles
		for _, write := range s.Advise().Writes {
			o := unstructuredOf(write.Overlay.Object)
			o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: autoscaling.FieldManager, Operation: metav1.ManagedFieldsOperationApply}})
			s.Overlays = []autoscaling.Overlay{autoscaling.OverlayOf(o)}
			writes++
		}
		s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{only(t, s).NodeGroupStatus}
		s.Overlays = nil
	}
	g.Expect(writes).To(Equal(1))
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonRemovedByOther))
	g.Expect(only(t, s).Message).To(ContainSubstring("deleted NodeOverlay gpu-sharing-research-gpu-"))

	// The way back: Advise, then Manage.
	s.Policies[0].Spec.Autoscaling.Mode = v1alpha1.AutoscalingModeAdvise
	s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{only(t, s).NodeGroupStatus}
	s.Policies[0].Spec.Autoscaling.Mode = v1alpha1.AutoscalingModeManage
	g.Expect(s.Advise().Writes).To(HaveLen(1))
}

// What does not fit into the status is counted, and what the operator has written to stays known.
func TestMoreNodeGroupsThanTheStatusLists(t *testing.T) {
	g := NewWithT(t)
	s := autoscaling.Snapshot{Now: now, OpenShift: "4.19.3", Policies: []v1alpha1.GPUSharingPolicy{policy(t, "research", unrenamed+
		"\nnodeSelector: {matchLabels: {pool: gpu}}\nautoscaling: {mode: Manage, nodeShapes: [{product: "+a100+", gpusPerNode: 1, nodeGroups: []}]}")}}
	shape := &s.Policies[0].Spec.Autoscaling.NodeShapes[0]
	for i := range v1alpha1.MostNodeGroups + 6 {
		set := machineSet(autoscaling.GroupOpenShift, nil)
		set.Name, set.UID = fmt.Sprintf("set-%02d", i), fmt.Sprintf("uid-%02d", i)
		s.Scalables = append(s.Scalables, set)
		shape.NodeGroups = append(shape.NodeGroups, v1alpha1.NodeGroupReference{Kind: v1alpha1.NodeGroupMachineSet, Namespace: "ns", Name: set.Name})
	}
	last := len(s.Scalables) - 1
	for _, write := range s.Advise().Writes {
		if write.Annotate.Name == s.Scalables[last].Name {
			apply(t, &s.Scalables[last], write.Annotate)
		}
	}
	groups := s.Advise().Groups["research"]
	listed := autoscaling.Listed(groups)
	g.Expect(listed).To(HaveLen(v1alpha1.MostNodeGroups))
	g.Expect(listed[0]).To(And(HaveField("Name", s.Scalables[last].Name), HaveField("Written", Not(BeEmpty()))))
	c, _ := autoscaling.Condition(groups)
	g.Expect(c.Message).To(HaveSuffix("status.nodeGroups lists 64 of 70 node groups"))
}

// applied is the NodeOverlay that the policy has written, as the API server returns it.
func applied(t *testing.T, s autoscaling.Snapshot) autoscaling.Overlay {
	t.Helper()
	o := unstructuredOf(s.Advise().Writes[0].Overlay.Object)
	o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: autoscaling.FieldManager, Operation: metav1.ManagedFieldsOperationApply}})
	return autoscaling.OverlayOf(o)
}

// The NodeOverlay of a policy that is deleted and created again at once (kubectl replace --force) still belongs to the
// deleted one, and the garbage collector deletes it.
func TestTheNodeOverlayOfAPolicyThatIsCreatedAgain(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	s.Policies[0].UID = "policy-1"
	s.Overlays = []autoscaling.Overlay{applied(t, s)}
	g.Expect(s.Advise().Writes).To(BeEmpty())
	s.Policies[0].UID = "policy-2"
	again := s.Advise()
	s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{again.Groups["research"][0].NodeGroupStatus}
	s.Overlays = nil // by the garbage collector
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonConfiguring))
	g.Expect(s.Advise().Writes).To(HaveLen(1))
	g.Expect(again.Writes).To(HaveLen(1), "it is given to the new policy before")
}

// What the operator itself deletes, because the mode is Advise, it creates again once the mode is Manage.
func TestTheOperatorDoesNotTakeItselfForAnotherController(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	s.Overlays = []autoscaling.Overlay{applied(t, s)}
	s.Policies[0].Spec.Autoscaling.Mode = v1alpha1.AutoscalingModeAdvise
	advice := s.Advise()
	g.Expect(advice.Writes[0].Delete).NotTo(BeNil())
	s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{advice.Groups["research"][0].NodeGroupStatus}
	s.Overlays = nil
	s.Policies[0].Spec.Autoscaling.Mode = v1alpha1.AutoscalingModeManage
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonConfiguring))
}

// A user who keeps the NodeOverlay in a source of their own, as the status advises, is not told to delete it.
func TestTheNodeOverlayOfAUserInItsDesiredState(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	theirs := applied(t, s)
	theirs.Policy, theirs.Observed = "", true
	s.Overlays = []autoscaling.Overlay{theirs}
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonConfigured))
	g.Expect(only(t, s).Written).To(BeEmpty())
	g.Expect(s.Advise().Writes).To(BeEmpty())
	s.Overlays[0].Weight++
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonOwnedByOther))
}

// ofType are the labels that Karpenter gives an instance type of AWS.
func ofType(name, gpu, count, memory string) map[string]string {
	return map[string]string{
		"karpenter.sh/nodepool": "gpu", "node.kubernetes.io/instance-type": name,
		"karpenter.k8s.aws/instance-gpu-name": gpu, "karpenter.k8s.aws/instance-gpu-count": count, "karpenter.k8s.aws/instance-gpu-memory": memory,
	}
}

// selects is Karpenter's comparison of a NodeOverlay with the labels of an instance type (sigs.k8s.io/karpenter pkg/scheduling/requirement.go).
func selects(o autoscaling.Overlay, labels map[string]string) bool {
	for _, r := range o.Requirements {
		is, _ := strconv.Atoi(labels[r.Key])
		bound, _ := strconv.Atoi(r.Values[0])
		if r.Operator == "In" && !slices.Contains(r.Values, labels[r.Key]) || r.Operator == "Gt" && is <= bound || r.Operator == "Lt" && is >= bound {
			return false
		}
	}
	return true
}

// Karpenter takes the cheapest instance type that offers what a pod asks for, so a NodeOverlay is for the GPUs of the policy alone: not for
// fractions of them (g6f has a vGPU of an L4, aws/karpenter-provider-aws issue 8324), nor for those of the same name and other memory; and for
// one whose GPU EC2 does not count (issue 8368).
func TestTheNodeOverlayOnAWSIsForTheGPUsOfThePolicy(t *testing.T) {
	vgpu := node("b", "NVIDIA-L4-6Q", 1, inPool("g6f.2xlarge"))
	vgpu.GPU.Status.Devices[0].Virtual = true
	for product, c := range map[string]struct {
		count   int
		is, not map[string]string
	}{
		"NVIDIA-L4":             {1, ofType("g6.xlarge", "l4", "1", "22888"), ofType("g6f.2xlarge", "l4", "1", "5722")},
		"NVIDIA-H100-80GB-HBM3": {1, ofType("p5.4xlarge", "h100", "0", "81920"), ofType("p5.48xlarge", "h100", "8", "81920")},
		"Tesla-V100-SXM2-32GB":  {8, ofType("p3dn.24xlarge", "v100", "8", "32768"), ofType("p3.16xlarge", "v100", "8", "16384")},
		"Tesla-V100-SXM2-16GB":  {8, ofType("p3.16xlarge", "v100", "8", "16384"), ofType("p3dn.24xlarge", "v100", "8", "32768")},
		"NVIDIA-A100-SXM4-80GB": {8, ofType("p4de.24xlarge", "a100", "8", "81920"), ofType("p4d.24xlarge", "a100", "8", "40960")},
		a100:                    {8, ofType("p4d.24xlarge", "a100", "8", "40960"), ofType("p4de.24xlarge", "a100", "8", "81920")},
		t4:                      {4, ofType("g4dn.12xlarge", "t4", "4", "16384"), ofType("g4dn.xlarge", "t4", "1", "16384")},
	} {
		t.Run(product, func(t *testing.T) {
			g := NewWithT(t)
			w := karpenter(t, renamed+"\nautoscaling: {mode: Manage}", node("a", product, c.count, inPool(c.is["node.kubernetes.io/instance-type"])))
			w.Pools[0].NodeClassGroup = "karpenter.k8s.aws"
			o := made(t, w)
			g.Expect(selects(o, c.is)).To(BeTrue(), "%v", o.Requirements)
			g.Expect(selects(o, c.not)).To(BeFalse(), "%v", o.Requirements)
			if product == "NVIDIA-L4" {
				w.Nodes = append(w.Nodes, vgpu)
				g.Expect(selects(made(t, w), c.not)).To(BeFalse(), "a virtual GPU that is there already changes nothing")
			}
		})
	}
}
