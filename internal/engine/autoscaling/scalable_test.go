// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"maps"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

func asMap(v any) map[string]any {
	m, _ := v.(map[string]any)
	return m
}

func unstructuredOf(o map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: o}
}

// machineSet is MachineSet ns/set.
func machineSet(group string, annotations map[string]string) autoscaling.Scalable {
	s := autoscaling.Scalable{
		Ref:     autoscaling.Ref{Group: group, Kind: v1alpha1.NodeGroupMachineSet, Namespace: "ns", Name: "set"},
		Version: group + "/v1beta1", UID: "set-1", ResourceVersion: "7", Labels: map[string]string{"pool": "gpu"}, Annotations: map[string]string{}, Managers: map[string][]string{},
	}
	maps.Copy(s.Annotations, annotations)
	for key := range annotations {
		s.Managers[key] = []string{"kubectl-edit"}
	}
	return s
}

const shapeOfSet = `
nodeSelector: {matchLabels: {pool: gpu}}
autoscaling: {mode: Manage, nodeShapes: [{product: NVIDIA-A100-SXM4-40GB, gpusPerNode: 1, nodeGroups: [{kind: MachineSet, namespace: ns, name: set}]}]}`

// scalable is a snapshot with MachineSet ns/set.
func scalable(t *testing.T, group, spec string, annotations map[string]string) autoscaling.Snapshot {
	t.Helper()
	return autoscaling.Snapshot{
		Now: now, Policies: []v1alpha1.GPUSharingPolicy{policy(t, "research", spec+shapeOfSet)}, OpenShift: "4.19.3",
		Scalables: []autoscaling.Scalable{machineSet(group, annotations)},
	}
}

// apply plays the API server: the annotations of the operator are exactly these afterwards.
func apply(t *testing.T, s *autoscaling.Scalable, a *autoscaling.Annotate) {
	t.Helper()
	g := NewWithT(t)
	g.Expect(a).NotTo(BeNil())
	g.Expect(a.UID).To(Equal(s.UID))
	g.Expect(a.ResourceVersion).To(Equal(s.ResourceVersion))
	for key, managers := range s.Managers {
		kept := []string{}
		for _, m := range managers {
			if m != autoscaling.FieldManager {
				kept = append(kept, m)
			}
		}
		if _, applied := a.Annotations[key]; !applied && len(kept) == 0 {
			delete(s.Annotations, key)
			delete(s.Managers, key)
			continue
		}
		s.Managers[key] = kept
	}
	for key, value := range a.Annotations {
		if have, found := s.Annotations[key]; found && have != value && len(s.Managers[key]) > 0 {
			g.Expect(a.Force).To(BeTrue(), "conflict with %v about %s", s.Managers[key], key)
			s.Managers[key] = nil
		}
		s.Annotations[key] = value
		s.Managers[key] = append(s.Managers[key], autoscaling.FieldManager)
	}
	s.ResourceVersion += "1"
}

func TestAnnotationsOfClusterAPI(t *testing.T) {
	g := NewWithT(t)
	s := scalable(t, autoscaling.GroupClusterAPI, renamed, nil)
	apply(t, &s.Scalables[0], s.Advise().Writes[0].Annotate)
	g.Expect(s.Scalables[0].Annotations).To(And(
		HaveKeyWithValue(autoscaling.AnnotationGPUType, shared), HaveKeyWithValue(autoscaling.AnnotationGPUCount, "10"), HaveLen(4)))
	g.Expect(s.Advise().Writes).To(BeEmpty())
	group := only(t, s)
	g.Expect(group.Reason).To(Equal(v1alpha1.ReasonScaleDownCandidate))
	g.Expect(group.Written).To(Equal([]string{autoscaling.AnnotationGPUCount + "=10", autoscaling.AnnotationGPUType + "=" + shared, annotationLabels + "=pool=gpu"}))

	s.Policies[0].Spec.Sharing.TimeSlicing.Replicas = 4
	apply(t, &s.Scalables[0], s.Advise().Writes[0].Annotate)
	g.Expect(s.Scalables[0].Annotations).To(HaveKeyWithValue(autoscaling.AnnotationGPUCount, "4"))
	s.Policies = nil
	apply(t, &s.Scalables[0], s.Advise().Writes[0].Annotate)
	g.Expect(s.Scalables[0].Annotations).To(BeEmpty(), "there was nothing before")
	g.Expect(s.Advise().Writes).To(BeEmpty())
}

func TestAMixedLayoutAnnouncesOneProfile(t *testing.T) {
	g := NewWithT(t)
	s := scalable(t, autoscaling.GroupClusterAPI, layout, nil)
	group := only(t, s)
	g.Expect(s.Advise().Writes[0].Annotate.Annotations).To(And(
		HaveKeyWithValue(autoscaling.AnnotationGPUType, "nvidia.com/mig-1g.5gb"), HaveKeyWithValue(autoscaling.AnnotationGPUCount, "2")))
	g.Expect(group.Reason).To(Equal(v1alpha1.ReasonMultipleResources))
	g.Expect(group.Message).To(And(ContainSubstring("which is nvidia.com/mig-1g.5gb"), ContainSubstring("nvidia.com/mig-3g.20gb starts"), ContainSubstring("minimum size 1")))
}

func TestOpenShiftKnowsOneResource(t *testing.T) {
	for name, c := range map[string]struct {
		spec, version string
		reason        string
		says          string
		count         string
	}{
		"replicas that keep the name":    {unrenamed, "4.19.3", v1alpha1.ReasonConfiguring, "gpu-count=8", "8"},
		"MIG strategy single":            {single, "4.21.0", v1alpha1.ReasonConfiguring, "gpu-count=7", "7"},
		"renamed":                        {renamed, "4.19.3", v1alpha1.ReasonResourceNotSupported, "minReplicas: 1", ""},
		"MIG profiles":                   {filled, "4.19.3", v1alpha1.ReasonResourceNotSupported, "minReplicas: 1", ""},
		"before 4.19":                    {unrenamed, "4.18.30", v1alpha1.ReasonResourceNotSupported, "OpenShift is 4.18.30", ""},
		"a version that is not readable": {unrenamed, "", v1alpha1.ReasonResourceNotSupported, "not known", ""},
		"5.0":                            {unrenamed, "5.0.0", v1alpha1.ReasonConfiguring, "gpu-count=8", "8"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			s := scalable(t, autoscaling.GroupOpenShift, c.spec, nil)
			s.OpenShift = c.version
			group := only(t, s)
			g.Expect(group.Reason).To(Equal(c.reason), group.Message)
			g.Expect(group.Message).To(ContainSubstring(c.says))
			if c.count == "" {
				g.Expect(s.Advise().Writes).To(BeEmpty())
				return
			}
			g.Expect(s.Advise().Writes[0].Annotate.Annotations).To(And(HaveKeyWithValue(autoscaling.AnnotationGPUCount, c.count), Not(HaveKey(autoscaling.AnnotationGPUType))))
			g.Expect(group.Paste[0]).To(And(ContainSubstring("resourceLimits.gpus"), ContainSubstring("delayAfterAdd")))
		})
	}
}

// Values of another are reported. Defaults of cluster-autoscaler-operator are taken over, and restored.
func TestValuesOfOthers(t *testing.T) {
	g := NewWithT(t)
	snapshot := scalable(t, autoscaling.GroupOpenShift, unrenamed, map[string]string{autoscaling.AnnotationGPUCount: "1"})
	group := only(t, snapshot)
	g.Expect(group.Reason).To(Equal(v1alpha1.ReasonOwnedByOther))
	g.Expect(group.Message).To(ContainSubstring("kubectl-edit"))
	g.Expect(snapshot.Advise().Writes).To(BeEmpty())

	s := &snapshot.Scalables[0]
	s.Managers[autoscaling.AnnotationGPUCount] = []string{"cluster-autoscaler-operator"}
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	g.Expect(s.Annotations).To(HaveKeyWithValue(autoscaling.AnnotationGPUCount, "8"))
	g.Expect(snapshot.Advise().Writes).To(BeEmpty())
	snapshot.Policies[0].Spec.Autoscaling.Mode = v1alpha1.AutoscalingModeAdvise
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	g.Expect(s.Annotations).To(Equal(map[string]string{autoscaling.AnnotationGPUCount: "1"}), "nobody fills a default in again")
	snapshot.Policies[0].Spec.Autoscaling.Mode = v1alpha1.AutoscalingModeManage
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	snapshot.Policies = nil
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	g.Expect(s.Annotations).To(Equal(map[string]string{autoscaling.AnnotationGPUCount: "1"}), "also the second time")
}

func TestAValueThatAnotherHasTakenOverStays(t *testing.T) {
	g := NewWithT(t)
	snapshot := scalable(t, autoscaling.GroupOpenShift, unrenamed, nil)
	s := &snapshot.Scalables[0]
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	s.Annotations[autoscaling.AnnotationGPUCount], s.Managers[autoscaling.AnnotationGPUCount] = "3", []string{"argocd-controller"}
	g.Expect(only(t, snapshot).Reason).To(Equal(v1alpha1.ReasonOwnedByOther))
	snapshot.Policies = nil
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	g.Expect(s.Annotations).To(Equal(map[string]string{autoscaling.AnnotationGPUCount: "3"}))
}

func TestAValueThatAnotherAppliesTooStays(t *testing.T) {
	g := NewWithT(t)
	snapshot := scalable(t, autoscaling.GroupOpenShift, unrenamed, map[string]string{autoscaling.AnnotationGPUCount: "1"})
	s := &snapshot.Scalables[0]
	s.Managers[autoscaling.AnnotationGPUCount] = []string{"cluster-autoscaler-operator"}
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	s.Managers[autoscaling.AnnotationGPUCount] = append(s.Managers[autoscaling.AnnotationGPUCount], "argocd-controller") // with the value of the operator
	snapshot.Policies = nil
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	g.Expect(s.Annotations).To(Equal(map[string]string{autoscaling.AnnotationGPUCount: "8"}))
}

func TestAToolThatRemovesTheAnnotationsIsLeftAlone(t *testing.T) {
	g := NewWithT(t)
	snapshot := scalable(t, autoscaling.GroupOpenShift, unrenamed, nil)
	s := &snapshot.Scalables[0]
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	snapshot.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{only(t, snapshot).NodeGroupStatus}
	s.Annotations, s.Managers, s.LastManager = map[string]string{}, map[string][]string{}, "argocd-controller"
	for range 2 { // it stays so
		group := only(t, snapshot)
		g.Expect(group.Reason).To(Equal(v1alpha1.ReasonRemovedByOther), group.Message)
		g.Expect(group.Message).To(ContainSubstring("argocd-controller"))
		g.Expect(snapshot.Advise().Writes).To(BeEmpty())
		snapshot.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{group.NodeGroupStatus}
	}
	snapshot.Policies[0].Spec.Sharing.TimeSlicing.Replicas = 4
	g.Expect(snapshot.Advise().Writes).To(HaveLen(1), "another policy is another matter")
}

func TestAnAnnotationThatIsNoNumber(t *testing.T) {
	g := NewWithT(t)
	s := scalable(t, autoscaling.GroupClusterAPI, renamed, map[string]string{autoscaling.AnnotationGPUCount: "ten"})
	group := only(t, s)
	g.Expect(group.Reason).To(Equal(v1alpha1.ReasonInvalidValue))
	g.Expect(group.Message).To(And(ContainSubstring(`"ten"`), ContainSubstring("kubectl-edit"), ContainSubstring("MachineSet ns/set")))
	g.Expect(s.Advise().Writes).To(BeEmpty())
}

// The record is all that tells what was there before; without it, what is ours goes.
func TestARecordThatCannotBeRead(t *testing.T) {
	g := NewWithT(t)
	snapshot := scalable(t, autoscaling.GroupClusterAPI, renamed, nil)
	s := &snapshot.Scalables[0]
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	s.Annotations[v1alpha1.AnnotationAutoscaling] = "{"
	snapshot.Policies = nil
	apply(t, s, snapshot.Advise().Writes[0].Annotate)
	g.Expect(s.Annotations).To(BeEmpty())
}

func TestCloudsGetTags(t *testing.T) {
	for label, c := range map[string]struct {
		spec string
		want []string
	}{
		"eks.amazonaws.com/nodegroup": {renamed, []string{
			"k8s.io/cluster-autoscaler/node-template/resources/nvidia.com/gpu=0", "k8s.io/cluster-autoscaler/node-template/resources/nvidia.com/gpu.shared=10",
		}},
		"kubernetes.azure.com/agentpool": {unrenamed, []string{"k8s.io_cluster-autoscaler_node-template_resources_nvidia.com_gpu=8"}},
		"cloud.google.com/gke-nodepool": {layout, []string{
			"clusterautoscaler-nodetemplate-resources.nvidia.com/gpu=0", "clusterautoscaler-nodetemplate-resources.nvidia.com/mig-1g.5gb=2",
			"clusterautoscaler-nodetemplate-resources.nvidia.com/mig-3g.20gb=1",
		}},
	} {
		g := NewWithT(t)
		n := node("a", a100, 1, map[string]string{label: "gpu"})
		n.Allocatable = map[string]int64{shared: 1}
		s := autoscaling.Snapshot{Now: now, Policies: []v1alpha1.GPUSharingPolicy{policy(t, "research", c.spec+"\nautoscaling: {mode: Manage}")}, Nodes: []cluster.Node{n}}
		group := only(t, s)
		g.Expect(group.Reason).To(Equal(v1alpha1.ReasonAdviceOnly))
		g.Expect(group.Paste).To(Equal(c.want))
		g.Expect(s.Advise().Writes).To(BeEmpty())
		s.Nodes, s.Policies[0].Status.NodeGroups = nil, []v1alpha1.NodeGroupStatus{group.NodeGroupStatus}
		g.Expect(only(t, s).Paste).To(Equal(c.want), "at zero nodes, which the cloud does not show")
	}
}

func TestAMachineSetOfAMachineDeploymentIsNoGroup(t *testing.T) {
	g := NewWithT(t)
	s := scalable(t, autoscaling.GroupClusterAPI, renamed, nil)
	deployment := machineSet(autoscaling.GroupClusterAPI, nil)
	deployment.Kind, deployment.Name = v1alpha1.NodeGroupMachineDeployment, "deployment"
	s.Scalables[0].Owner = &deployment.Ref
	s.Scalables = append(s.Scalables, deployment)
	n := node("a", a100, 1, nil)
	n.Annotations = map[string]string{"cluster.x-k8s.io/owner-kind": "MachineSet", "cluster.x-k8s.io/owner-name": "set", "cluster.x-k8s.io/cluster-namespace": "ns"}
	n.Labels["pool"] = "gpu"
	s.Nodes = []cluster.Node{n}
	groups := s.Advise().Groups["research"]
	g.Expect(groups).To(HaveLen(2))
	g.Expect(groups[0].Name).To(Equal("deployment"))
	before := len(s.Scalables)
	s.Add(unstructuredOf(map[string]any{"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool", "metadata": map[string]any{"namespace": "ns", "name": "pool"}}))
	g.Expect(s.Scalables).To(HaveLen(before), "MachinePools are not known")
	g.Expect(groups[0].Nodes).To(BeEquivalentTo(1))
	g.Expect(groups[1].Reason).To(Equal(v1alpha1.ReasonNodeGroupNotFound))
	g.Expect(groups[1].Message).To(ContainSubstring("belongs to MachineDeployment ns/deployment"))
	g.Expect(s.Advise().Writes[0].Annotate.Ref).To(Equal(deployment.Ref))
}

// Cluster API copies the annotations of a MachineDeployment to its MachineSets, and users copy MachineSets of
// OpenShift.
func TestAnnotationsOnACopyAreNotTheOperators(t *testing.T) {
	g := NewWithT(t)
	s := scalable(t, autoscaling.GroupOpenShift, unrenamed, map[string]string{
		autoscaling.AnnotationGPUCount: "8", v1alpha1.AnnotationAutoscaling: `{"policy":"research","previous":{"` + autoscaling.AnnotationGPUCount + `":"1"}}`,
	})
	s.Policies = nil
	g.Expect(s.Advise().Writes).To(BeEmpty())
}

const annotationLabels, annotationTaints = "capacity.cluster-autoscaler.kubernetes.io/labels", "capacity.cluster-autoscaler.kubernetes.io/taints"

// deployment is MachineSet ns/set of Cluster API as the operator reads it, with labels in its template.
func deployment(labels, annotations map[string]any) autoscaling.Scalable {
	return autoscaling.ScalableOf(unstructuredOf(map[string]any{
		"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineSet",
		"metadata": map[string]any{"namespace": "ns", "name": "set", "uid": "set-1", "annotations": annotations},
		"spec":     map[string]any{"template": map[string]any{"metadata": map[string]any{"labels": labels}}},
	}))
}

// ofClusterAPI is a node of MachineSet ns/set.
func ofClusterAPI(labels map[string]string) cluster.Node {
	n := node("a", a100, 1, labels)
	n.Allocatable = map[string]int64{"nvidia.com/gpu": 1}
	n.Annotations = map[string]string{"cluster.x-k8s.io/owner-kind": "MachineSet", "cluster.x-k8s.io/owner-name": "set", "cluster.x-k8s.io/cluster-namespace": "ns"}
	return n
}

// Cluster API gives nodes only labels of three domains (https://cluster-api.sigs.k8s.io/reference/api/metadata-propagation), and those of a flag
// that nobody shows. A node that no policy governs never offers what would be announced.
func TestALabelThatNodesDoNotGetSelectsNoNewNode(t *testing.T) {
	g := NewWithT(t)
	w := scalable(t, autoscaling.GroupClusterAPI, renamed, nil)
	w.Scalables[0] = deployment(map[string]any{"pool": "gpu"}, nil)
	g.Expect(w.Advise().Writes).To(BeEmpty())
	g.Expect(only(t, w).Reason).To(Equal(v1alpha1.ReasonNodeGroupNotSelected))
	g.Expect(only(t, w).Message).To(And(ContainSubstring("node-restriction.kubernetes.io"), ContainSubstring(annotationLabels)))

	for _, label := range []string{"node-role.kubernetes.io/gpu", "node-restriction.kubernetes.io/pool", "eu.node.cluster.x-k8s.io/pool"} {
		w.Scalables[0] = deployment(map[string]any{label: "gpu"}, nil)
		w.Policies[0].Spec.NodeSelector.MatchLabels = map[string]string{label: "gpu"}
		g.Expect(w.Advise().Writes).To(HaveLen(1), label)
	}
}

// What a live node has counts before what the object says.
func TestALiveNodeWithoutTheLabelOfItsTemplateCounts(t *testing.T) {
	g := NewWithT(t)
	w := scalable(t, autoscaling.GroupClusterAPI, renamed, nil)
	w.Nodes = []cluster.Node{ofClusterAPI(nil)}
	g.Expect(w.Advise().Writes).To(BeEmpty())
	g.Expect(only(t, w).Reason).To(Equal(v1alpha1.ReasonNodeGroupNotSelected))
	w.Nodes = []cluster.Node{ofClusterAPI(map[string]string{"pool": "gpu"})}
	w.Scalables[0].Labels = nil
	g.Expect(w.Advise().Writes).To(HaveLen(1), "a flag gives nodes the label")
}

// The kubelet of a node of NVIDIA's DRA driver lists no GPU, so an autoscaler would start nodes for pods that it sees waiting; and what the driver
// refuses no node ever offers.
func TestAGroupOfTheDRADriverIsNotAnnounced(t *testing.T) {
	for name, spec := range map[string]string{"renamed": renamed, "instances": filled, "whole": exclusive} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w := scalable(t, autoscaling.GroupClusterAPI, spec, nil)
			apply(t, &w.Scalables[0], w.Advise().Writes[0].Annotate)
			n := ofClusterAPI(map[string]string{"pool": "gpu"})
			n.Allocatable = nil
			if n.GPU.Spec.ConfigName = "dra:1234"; spec == renamed {
				n.GPU.Spec.ConfigName, n.GPU.Status.Conditions = "", []metav1.Condition{{Type: v1alpha1.ConditionReady, Reason: v1alpha1.ReasonNotOnDRA}}
			}
			w.Nodes = []cluster.Node{n}
			group := only(t, w)
			g.Expect(group.Reason).To(Equal(v1alpha1.ReasonResourceNotSupported), group.Message)
			g.Expect(w.Advise().Writes).To(HaveLen(1), "what was announced before a node came")
			apply(t, &w.Scalables[0], w.Advise().Writes[0].Annotate)
			g.Expect(w.Scalables[0].Annotations).To(BeEmpty())
			w.Nodes, w.Policies[0].Status.NodeGroups = nil, []v1alpha1.NodeGroupStatus{group.NodeGroupStatus}
			g.Expect(w.Advise().Writes).To(BeEmpty(), "an empty group")
		})
	}
}

// A group whose nodes have shown a label stays announced when it becomes empty: only then it is read.
func TestAGroupThatBecomesEmptyStaysAnnounced(t *testing.T) {
	g := NewWithT(t)
	w := scalable(t, autoscaling.GroupClusterAPI, renamed, nil)
	w.Scalables[0].Labels = nil // a flag gives nodes the label
	w.Nodes = []cluster.Node{ofClusterAPI(map[string]string{"pool": "gpu"})}
	apply(t, &w.Scalables[0], w.Advise().Writes[0].Annotate)
	announced := maps.Clone(w.Scalables[0].Annotations)
	g.Expect(announced).To(HaveKeyWithValue(annotationLabels, "pool=gpu"))
	w.Nodes = nil
	for _, write := range w.Advise().Writes {
		apply(t, &w.Scalables[0], write.Annotate)
	}
	g.Expect(w.Scalables[0].Annotations).To(Equal(announced), only(t, w).Message)
	w.Scalables[0].Labels = map[string]string{"pool": "cpu"}
	g.Expect(only(t, w).Reason).To(Equal(v1alpha1.ReasonNodeGroupNotSelected), "the template says otherwise")
}

// The annotation is what Cluster Autoscaler takes for the labels of a new node.
func TestLabelsThatClusterAutoscalerIsTold(t *testing.T) {
	g := NewWithT(t)
	w := scalable(t, autoscaling.GroupClusterAPI, renamed, nil)
	w.Scalables[0] = deployment(nil, map[string]any{annotationLabels: "pool=gpu,cluster-api/accelerator=a100"})
	w.Scalables[0].Managers = map[string][]string{annotationLabels: {"kubectl-annotate"}}
	g.Expect(w.Advise().Writes).To(HaveLen(1))
	g.Expect(w.Advise().Writes[0].Annotate.Annotations).NotTo(HaveKey(annotationLabels))
	g.Expect(reports(only(t, w), v1alpha1.ReasonAcceleratorLabel)).To(BeTrue(), only(t, w).Message)
}

// Labels that nodes get, and the taints of the policy, are announced: Cluster Autoscaler reads no template of Cluster API. Undone, nothing of
// that is left; and what another has written stays.
func TestLabelsAndTaintsAreAnnounced(t *testing.T) {
	g := NewWithT(t)
	const spec = renamed + "\ntaints: [{key: shared, value: 'yes', effect: NoSchedule}]"
	w := scalable(t, autoscaling.GroupClusterAPI, spec, nil)
	apply(t, &w.Scalables[0], w.Advise().Writes[0].Annotate)
	g.Expect(w.Scalables[0].Annotations).To(And(HaveKeyWithValue(annotationLabels, "pool=gpu"), HaveKeyWithValue(annotationTaints, "shared=yes:NoSchedule")))
	g.Expect(w.Advise().Writes).To(BeEmpty())
	w.Scalables[0].Labels["pool"] = "cpu"
	g.Expect(w.Advise().Groups["research"][0].Reason).To(Equal(v1alpha1.ReasonNodeGroupNotSelected), "what the operator has written tells it nothing")
	w.Scalables[0].Labels["pool"] = "gpu"
	w.Policies = nil
	apply(t, &w.Scalables[0], w.Advise().Writes[0].Annotate)
	g.Expect(w.Scalables[0].Annotations).To(BeEmpty())

	theirs := scalable(t, autoscaling.GroupClusterAPI, spec, map[string]string{annotationTaints: "theirs=:NoExecute"})
	group := only(t, theirs)
	g.Expect(group.Reason).To(Equal(v1alpha1.ReasonOwnedByOther), group.Message)
	g.Expect(group.Message).To(ContainSubstring("Set it to theirs=:NoExecute,shared=yes:NoSchedule"))
	g.Expect(theirs.Advise().Writes[0].Annotate.Annotations).To(And(HaveKey(autoscaling.AnnotationGPUType), Not(HaveKey(annotationTaints))))
}

// What a policy asks for no more is not announced any more: pods would start no node because of a taint that nodes do not have.
func TestTaintsThatAreGoneAreNotAnnounced(t *testing.T) {
	g := NewWithT(t)
	w := scalable(t, autoscaling.GroupClusterAPI, renamed+"\ntaints: [{key: shared, value: 'yes', effect: NoSchedule}]", nil)
	apply(t, &w.Scalables[0], w.Advise().Writes[0].Annotate)
	w.Policies[0].Spec.Taints = nil
	g.Expect(only(t, w).Reason).To(Equal(v1alpha1.ReasonConfiguring))
	g.Expect(w.Advise().Writes).To(HaveLen(1))
	apply(t, &w.Scalables[0], w.Advise().Writes[0].Annotate)
	g.Expect(w.Scalables[0].Annotations).To(And(HaveKey(autoscaling.AnnotationGPUType), HaveKey(annotationLabels), Not(HaveKey(annotationTaints))))
	g.Expect(w.Advise().Writes).To(BeEmpty())
}

// Of Cluster API nobody else says that a node has GPUs. OpenShift's controllers do, but that of vSphere.
func TestWholeGPUsAreAnnouncedWhereNobodyElseDoes(t *testing.T) {
	g := NewWithT(t)
	w := scalable(t, autoscaling.GroupClusterAPI, exclusive, nil)
	g.Expect(w.Advise().Writes[0].Annotate.Annotations).To(And(
		HaveKeyWithValue(autoscaling.AnnotationGPUType, "nvidia.com/gpu"), HaveKeyWithValue(autoscaling.AnnotationGPUCount, "1")))
	w = scalable(t, autoscaling.GroupOpenShift, exclusive, nil)
	g.Expect(w.Advise().Writes).To(HaveLen(1))
	w = scalable(t, autoscaling.GroupOpenShift, exclusive, map[string]string{"machine.openshift.io/GPU": "1"})
	g.Expect(w.Advise().Writes).To(BeEmpty())
	g.Expect(only(t, w).Reason).To(Equal(v1alpha1.ReasonConfigured))
}

// The gap before the startup taint is reported before the first node comes, with what closes it or bounds it.
func TestTheGapBeforeTheStartupTaintIsReported(t *testing.T) {
	const untilReady = "\nrollout: {startupTaint: UntilReady}"
	for name, c := range map[string]struct{ group, spec, says string }{
		"no startup taint at all": {autoscaling.GroupClusterAPI, renamed, "Set rollout.startupTaint: UntilReady"},
		"Cluster API":             {autoscaling.GroupClusterAPI, renamed + untilReady, "Register its nodes with the taint startup-taint.cluster-autoscaler.kubernetes.io/gpusharing=:NoSchedule"},
		"OpenShift":               {autoscaling.GroupOpenShift, unrenamed + untilReady, "maxReplicas of the MachineAutoscaler"},
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(only(t, scalable(t, c.group, c.spec, nil)).Message).To(And(ContainSubstring(v1alpha1.ReasonStartupGap), ContainSubstring(c.says)))
		})
	}
	g := NewWithT(t)
	w := scalable(t, autoscaling.GroupClusterAPI, renamed+untilReady, nil)
	for propagation, closes := range map[string]bool{"OnInitialization": true, "Always": false} { // always: Cluster API adds it again for ever
		w.Scalables[0] = autoscaling.ScalableOf(unstructuredOf(map[string]any{
			"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineSet", "metadata": map[string]any{"namespace": "ns", "name": "set"},
			"spec": map[string]any{"template": map[string]any{"metadata": map[string]any{"labels": map[string]any{"node-role.kubernetes.io/gpu": ""}}, "spec": map[string]any{
				"taints": []any{map[string]any{"key": v1alpha1.TaintStartupAutoscaler, "effect": "NoSchedule", "propagation": propagation}},
			}}},
		}))
		w.Policies[0].Spec.NodeSelector.MatchLabels = map[string]string{"node-role.kubernetes.io/gpu": ""}
		g.Expect(reports(only(t, w), v1alpha1.ReasonStartupGap)).NotTo(Equal(closes), only(t, w).Message)
	}
	g.Expect(only(t, scalable(t, autoscaling.GroupClusterAPI, exclusive, nil)).Message).NotTo(ContainSubstring(v1alpha1.ReasonStartupGap))
}

// What status.capacity of the infrastructure template says beside the announced resource is reported before the first pod waits: whole GPUs that
// nodes do not offer, and are right where nodes do. Three nodes were seen for a pod that none of them could take.
func TestTheCapacityOfTheTemplate(t *testing.T) {
	const profile1, profile3, gpu = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb", "nvidia.com/gpu"
	for name, c := range map[string]struct {
		spec     string
		capacity map[string]int64
		reason   string
		says     string
		not      string
	}{
		"renamed, and it names whole GPUs":      {renamed, map[string]int64{gpu: 1}, v1alpha1.ReasonMultipleResources, "status.capacity of AWSMachineTemplate ns/gpu says nvidia.com/gpu 1, and nodes will offer nvidia.com/gpu.shared 10", "If status"},
		"renamed, and it names none":            {renamed, map[string]int64{}, v1alpha1.ReasonConfiguring, "", "status.capacity"},
		"renamed, and nobody knows":             {renamed, nil, v1alpha1.ReasonConfiguring, "If status.capacity of the infrastructure template", ""},
		"the name is kept":                      {unrenamed, map[string]int64{gpu: 1}, v1alpha1.ReasonConfiguring, "", "status.capacity"},
		"two profiles, and it names the other":  {layout, map[string]int64{profile3: 1}, v1alpha1.ReasonConfiguring, "", v1alpha1.ReasonMultipleResources},
		"two profiles, and it names too many":   {layout, map[string]int64{profile3: 2}, v1alpha1.ReasonMultipleResources, "says nvidia.com/mig-3g.20gb 2", ""},
		"two profiles, and it names the GPU":    {layout, map[string]int64{gpu: 1, profile1: 7}, v1alpha1.ReasonMultipleResources, "says nvidia.com/gpu 1, and", ""},
		"two profiles, and it names no profile": {layout, map[string]int64{}, v1alpha1.ReasonMultipleResources, "No pod that asks for nvidia.com/mig-3g.20gb starts", "says"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			s := scalable(t, autoscaling.GroupClusterAPI, c.spec, nil)
			s.Scalables[0].Template, s.Scalables[0].Capacity = autoscaling.Template{Group: "infrastructure.cluster.x-k8s.io", Kind: "AWSMachineTemplate", Name: "gpu"}, c.capacity
			group := only(t, s)
			g.Expect(group.Reason).To(Equal(c.reason), group.Message)
			g.Expect(group.Message).To(ContainSubstring(c.says))
			if c.not != "" {
				g.Expect(group.Message).NotTo(ContainSubstring(c.not))
			}
		})
	}
	g := NewWithT(t)
	set := func(ref map[string]any) autoscaling.Template {
		return autoscaling.ScalableOf(unstructuredOf(map[string]any{
			"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineDeployment", "metadata": map[string]any{"namespace": "ns", "name": "set"},
			"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"infrastructureRef": ref}}},
		})).Template
	}
	want := autoscaling.Template{Group: "infrastructure.cluster.x-k8s.io", Kind: "AWSMachineTemplate", Name: "gpu"}
	g.Expect(set(map[string]any{"apiGroup": want.Group, "kind": want.Kind, "name": want.Name})).To(Equal(want))
	g.Expect(set(map[string]any{"apiVersion": want.Group + "/v1beta2", "kind": want.Kind, "name": want.Name})).To(Equal(want), "of v1beta1")
	g.Expect(autoscaling.CapacityOf(unstructuredOf(map[string]any{"status": map[string]any{"capacity": map[string]any{gpu: "2", "cpu": "8", "memory": "8Gi"}}}))).
		To(Equal(map[string]int64{gpu: 2}))
}
