// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

func TestWhatANewNodeAdvertises(t *testing.T) {
	for name, c := range map[string]struct {
		spec    string
		product string
		count   int
		want    map[string]int64
	}{
		"time-slicing, renamed": {renamed, t4, 4, map[string]int64{shared: 40}},
		"time-slicing":          {unrenamed, t4, 4, map[string]int64{"nvidia.com/gpu": 32}},
		"MPS":                   {mps, a100, 1, map[string]int64{shared: 4}},
		"MIG, one profile":      {filled, a100, 2, map[string]int64{"nvidia.com/mig-1g.5gb": 14}},
		"MIG, strategy single":  {single, a100, 2, map[string]int64{"nvidia.com/gpu": 14}},
		"MIG, a layout":         {layout, a100, 1, map[string]int64{"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-3g.20gb": 1}},
		"MIG beside whole GPUs": {"sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g.5gb}]}}", a100, 2, map[string]int64{
			"nvidia.com/mig-1g.5gb": 7, "nvidia.com/gpu": 1,
		}},
		"whole GPUs": {exclusive, a100, 8, map[string]int64{"nvidia.com/gpu": 8}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			live := only(t, karpenter(t, c.spec, node("a", c.product, c.count, inPool("type"))))
			g.Expect(offers(live)).To(Equal(c.want), live.Message)
			g.Expect(live.Product).To(Equal(c.product))
			g.Expect(live.GPUsPerNode).To(BeEquivalentTo(c.count))

			empty := karpenter(t, c.spec)
			empty.Policies[0].Spec.Autoscaling.NodeShapes = []v1alpha1.NodeShape{{
				Product: c.product, GPUsPerNode: int32(c.count), InstanceTypes: []string{"type"},
				NodeGroups: []v1alpha1.NodeGroupReference{{Kind: v1alpha1.NodeGroupNodePool, Name: "gpu"}},
			}}
			g.Expect(offers(only(t, empty))).To(Equal(c.want), "the same at zero nodes")
		})
	}
}

// A node that is shared already shows what its machine has. How it is shared now does not matter, on GPUs that the
// policy leaves alone either.
func TestANodeThatIsSharedAlreadyIsTakenAsNew(t *testing.T) {
	n := node("a", a100, 2, inPool("type"))
	n.GPU.Status.Devices[1].Sharing = v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}}
	n.Allocatable = map[string]int64{"nvidia.com/mig-7g.40gb": 1, "nvidia.com/gpu": 1}
	g := only(t, karpenter(t, "sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}\ngpuSelector: {indexes: [0]}", n))
	NewWithT(t).Expect(offers(g)).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7, "nvidia.com/gpu": 1}), g.Message)
}

func TestShapes(t *testing.T) {
	type snapshot = autoscaling.Snapshot
	two := func(t *testing.T) snapshot { t.Helper(); return karpenter(t, renamed+declared) }
	for name, c := range map[string]struct {
		snapshot func(t *testing.T) snapshot
		reason   string
		says     string
	}{
		"nothing is known of a NodePool that is selected": {func(t *testing.T) snapshot {
			t.Helper()
			s := karpenter(t, renamed+"\nnodeSelector: {matchLabels: {team: a}}")
			s.Pools[0].Labels["team"] = "a"
			return s
		}, v1alpha1.ReasonUnknownShape, "nodeShapes: {product: PRODUCT, gpusPerNode: N, instanceTypes: [TYPE], nodeGroups: [{kind: NodePool, name: gpu}]}"},
		"the nodes of a MachineSet differ": {func(t *testing.T) snapshot {
			t.Helper()
			a, b := node("a", t4, 1, nil), node("b", a100, 1, nil)
			a.Annotations["machine.openshift.io/machine"], b.Annotations["machine.openshift.io/machine"] = "ns/m-a", "ns/m-b"
			return snapshot{
				Now: now, Policies: []v1alpha1.GPUSharingPolicy{policy(t, "research", renamed+"\nnodeSelector: {matchLabels: {nvidia.com/gpu.present: \"true\"}}")},
				Nodes: []cluster.Node{a, b}, MachineSets: map[string]string{"ns/m-a": "ns/set", "ns/m-b": "ns/set"},
				Scalables: []autoscaling.Scalable{machineSet(autoscaling.GroupOpenShift, nil)},
			}
		}, v1alpha1.ReasonAmbiguousShape, "NVIDIA-A100-SXM4-40GB"},
		"a product that nobody knows cannot be partitioned": {func(t *testing.T) snapshot {
			t.Helper()
			s := two(t)
			s.Policies[0].Spec.Sharing = policy(t, "x", filled).Spec.Sharing
			s.Policies[0].Spec.Autoscaling.NodeShapes[0].Product = "NVIDIA-A100-SXM4-39GB"
			return s
		}, v1alpha1.ReasonUnknownShape, "NVIDIA-A100-SXM4-39GB"},
		"a GPU without MIG": {func(t *testing.T) snapshot {
			t.Helper()
			s := two(t)
			s.Policies[0].Spec.Sharing = policy(t, "x", filled).Spec.Sharing
			s.Policies[0].Spec.Autoscaling.NodeShapes[0].Product = t4
			return s
		}, v1alpha1.ReasonMIGNotSupported, "has no MIG"},
		"a layout that does not fit": {func(t *testing.T) snapshot {
			t.Helper()
			s := two(t)
			s.Policies[0].Spec.Sharing = policy(t, "x", "sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 4g.20gb, count: 2}]}]}}").Spec.Sharing
			return s
		}, v1alpha1.ReasonLayoutDoesNotFit, "NodePool gpu"},
		"a group that does not exist": {func(t *testing.T) snapshot {
			t.Helper()
			s := two(t)
			s.Pools = nil
			return s
		}, v1alpha1.ReasonNodeGroupNotFound, "no NodePool gpu"},
		"a group that the policy does not select": {func(t *testing.T) snapshot {
			t.Helper()
			s := two(t)
			s.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"team": "a"}}
			return s
		}, v1alpha1.ReasonNodeGroupNotSelected, "labels"},
	} {
		t.Run(name, func(t *testing.T) {
			g, s := NewWithT(t), c.snapshot(t)
			group := only(t, s)
			g.Expect(group.Reason).To(Equal(c.reason), group.Message)
			g.Expect(group.Message).To(ContainSubstring(c.says))
			g.Expect(group.Resources).To(BeEmpty(), "no value")
			g.Expect(s.Advise().Writes).To(BeEmpty())
		})
	}
}

func TestAShapeIsRememberedWhenTheNodesAreGone(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+"\nautoscaling: {mode: Manage}", node("a", t4, 4, inPool("t4.four")))
	s.Nodes[0].Allocatable = map[string]int64{shared: 40}
	before := only(t, s)
	g.Expect(before.Nodes).To(BeEquivalentTo(1))
	wrote := s.Advise().Writes[0].Overlay

	s.Nodes, s.Policies[0].Status.NodeGroups = nil, []v1alpha1.NodeGroupStatus{before.NodeGroupStatus}
	after := only(t, s)
	g.Expect(after.Nodes).To(BeZero())
	g.Expect(offers(after)).To(Equal(map[string]int64{shared: 40}))
	g.Expect(s.Advise().Writes[0].Overlay).To(Equal(wrote), "a NodeOverlay that changes makes Karpenter think about all nodes again")
}

// GPUs die. A new node has all of them.
func TestANodeThatLostAGPUIsNoOtherShape(t *testing.T) {
	g := NewWithT(t)
	group := only(t, karpenter(t, renamed, listing(node("a", t4, 3, inPool("t4.four")), plan.ResourceGPU, 3),
		listing(node("b", t4, 4, inPool("t4.four")), plan.ResourceGPU, 4)))
	g.Expect(group.Nodes).To(BeEquivalentTo(2))
	g.Expect(offers(group)).To(Equal(map[string]int64{shared: 40}))
}

func TestANodePoolHasANodeOverlayForEachShape(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+"\nautoscaling: {mode: Manage}", node("a", t4, 1, inPool("t4.one")), node("b", t4, 4, inPool("t4.four")), node("c", t4, 1, inPool("t4.big")))
	advice := s.Advise()
	g.Expect(advice.Groups["research"]).To(HaveLen(2))
	g.Expect(advice.Writes).To(HaveLen(2))
	var types [][]any
	for _, write := range advice.Writes {
		spec := asMap(write.Overlay.Object["spec"])
		types = append(types, asMap(spec["requirements"].([]any)[1])["values"].([]any))
		g.Expect(spec["capacity"]).To(HaveKeyWithValue("nvidia.com/gpu", "0"), "whole GPUs are hidden")
		owner := asMap(write.Overlay.Object["metadata"])["ownerReferences"].([]any)[0]
		g.Expect(owner).To(And(HaveKeyWithValue("name", "research"), HaveKeyWithValue("uid", "uid-research")))
	}
	g.Expect(types).To(ConsistOf([]any{"t4.big", "t4.one"}, []any{"t4.four"}))
}

func TestInstanceTypesOfANodePool(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	s.Policies[0].Spec.Autoscaling.NodeShapes[0].InstanceTypes = nil
	group := only(t, s)
	g.Expect(group.Reason).To(Equal(v1alpha1.ReasonUnknownShape))
	g.Expect(group.Message).To(ContainSubstring("nodeShapes[].instanceTypes"))
	g.Expect(s.Advise().Writes).To(BeEmpty(), "a NodeOverlay would be for nodes without GPUs too")
	s.Pools[0].InstanceTypes = []string{"gpu.two", "gpu.deux"}
	g.Expect(only(t, s).InstanceTypes).To(Equal([]string{"gpu.deux", "gpu.two"}))
	g.Expect(s.Advise().Writes).To(HaveLen(1), "the NodePool names them")
}

func TestOnAWSAGPUIsSelectedByNameAndCount(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	s.Policies[0].Spec.Autoscaling.NodeShapes[0].InstanceTypes = nil
	s.Pools[0].NodeClassGroup = "karpenter.k8s.aws"
	requirements := asMap(s.Advise().Writes[0].Overlay.Object["spec"])["requirements"]
	text, err := yaml.Marshal(requirements)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(text)).To(MatchYAML(`
- {key: karpenter.sh/nodepool, operator: In, values: [gpu]}
- {key: karpenter.k8s.aws/instance-gpu-name, operator: In, values: [a100]}
- {key: karpenter.k8s.aws/instance-gpu-count, operator: In, values: ["2"]}
- {key: karpenter.k8s.aws/instance-gpu-memory, operator: Gt, values: ["30720"]}
- {key: karpenter.k8s.aws/instance-gpu-memory, operator: Lt, values: ["51200"]}
`))
}

// made is the NodeOverlay that the operator writes, as the cluster has it.
func made(t *testing.T, s autoscaling.Snapshot) autoscaling.Overlay {
	t.Helper()
	NewWithT(t).Expect(s.Advise().Writes).To(HaveLen(1))
	applied := unstructuredOf(s.Advise().Writes[0].Overlay.Object)
	applied.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: autoscaling.FieldManager, Operation: metav1.ManagedFieldsOperationApply}})
	o := autoscaling.OverlayOf(applied)
	o.UID, o.Created = "1", now.Add(-time.Minute)
	return o
}

func TestWhatKarpenterMakesOfANodeOverlay(t *testing.T) {
	for name, c := range map[string]struct {
		change func(s *autoscaling.Snapshot, o *autoscaling.Overlay)
		reason string
		says   string
	}{
		"applies it":       {func(_ *autoscaling.Snapshot, o *autoscaling.Overlay) { o.Observed = true }, v1alpha1.ReasonConfigured, "knows by NodeOverlay"},
		"has just seen it": {func(_ *autoscaling.Snapshot, o *autoscaling.Overlay) { o.Created = now }, v1alpha1.ReasonConfiguring, "yet"},
		"does not look":    {func(*autoscaling.Snapshot, *autoscaling.Overlay) {}, v1alpha1.ReasonFeatureGateOff, "--feature-gates=NodeOverlay=true"},
		"finds a conflict": {func(_ *autoscaling.Snapshot, o *autoscaling.Overlay) {
			o.Observed, o.NotReady = true, "Conflict: conflict with another overlay"
		}, v1alpha1.ReasonOverlayConflict, "conflict with another overlay"},
		"prefers one of a higher weight": {func(s *autoscaling.Snapshot, o *autoscaling.Overlay) {
			o.Observed = true
			s.Overlays = append(s.Overlays, autoscaling.Overlay{Name: "theirs", Weight: 9000, Observed: true, Capacity: map[string]string{shared: "2"}})
		}, v1alpha1.ReasonOverlayConflict, "NodeOverlay theirs has weight 9000"},
		"prefers one for other nodes": {func(s *autoscaling.Snapshot, o *autoscaling.Overlay) {
			o.Observed = true
			s.Overlays = append(s.Overlays, autoscaling.Overlay{
				Name: "theirs", Weight: 9000, Observed: true, Capacity: map[string]string{shared: "2"},
				Requirements: []autoscaling.Requirement{{Key: "karpenter.sh/nodepool", Operator: "In", Values: []string{"cpu"}}},
			})
		}, v1alpha1.ReasonConfigured, "knows by NodeOverlay"},
		"has one of that name of another": {func(_ *autoscaling.Snapshot, o *autoscaling.Overlay) { o.Policy, o.Weight = "", 1 }, v1alpha1.ReasonOwnedByOther, "Delete it"},
	} {
		t.Run(name, func(t *testing.T) {
			g, s := NewWithT(t), karpenter(t, renamed+declared)
			o := made(t, s)
			c.change(&s, &o)
			s.Overlays = append(s.Overlays, o)
			group := only(t, s)
			g.Expect(group.Reason).To(Equal(c.reason), group.Message)
			g.Expect(group.Message).To(ContainSubstring(c.says))
			g.Expect(s.Advise().Writes).To(BeEmpty(), "it is as the operator wants it, or not the operator's")
		})
	}
}

func TestANodeOverlayGoesWhenNobodyWantsIt(t *testing.T) {
	s := karpenter(t, renamed+declared)
	s.Overlays = []autoscaling.Overlay{made(t, s), {Name: "theirs", UID: "2"}}
	for name, change := range map[string]func(s *autoscaling.Snapshot){
		"the policy is deleted":      func(s *autoscaling.Snapshot) { s.Policies = nil },
		"the policy ends":            func(s *autoscaling.Snapshot) { s.Policies[0].DeletionTimestamp = &metav1.Time{Time: now} },
		"the operator only advises":  func(s *autoscaling.Snapshot) { s.Policies[0].Spec.Autoscaling.Mode = v1alpha1.AutoscalingModeAdvise },
		"the NodePool is gone":       func(s *autoscaling.Snapshot) { s.Pools = nil },
		"the nodes offer whole GPUs": func(s *autoscaling.Snapshot) { s.Policies[0].Spec.Sharing = policy(t, "x", exclusive).Spec.Sharing },
	} {
		t.Run(name, func(t *testing.T) {
			g, s := NewWithT(t), s
			s.Policies = append([]v1alpha1.GPUSharingPolicy{}, s.Policies...)
			change(&s)
			writes := s.Advise().Writes
			g.Expect(writes).To(HaveLen(1))
			g.Expect(writes[0].Delete).To(HaveValue(Equal(autoscaling.DeleteOverlay{Name: s.Overlays[0].Name, UID: "1"})))
		})
	}
}

func TestAdviseWritesNothing(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, strings.Replace(renamed+declared, "Manage", "Advise", 1))
	group := only(t, s)
	g.Expect(s.Advise().Writes).To(BeEmpty())
	g.Expect(group.Reason).To(Equal(v1alpha1.ReasonAdviceOnly))
	g.Expect(group.Paste).To(HaveLen(1))
	pasted := &unstructured.Unstructured{}
	text, err := yaml.YAMLToJSON([]byte(group.Paste[0]))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(pasted.UnmarshalJSON(text)).To(Succeed())
	o := autoscaling.OverlayOf(pasted)
	o.Observed = true
	s.Overlays = []autoscaling.Overlay{o}
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonConfigured), "a user has pasted it")
}

func TestReplicasThatKeepTheNameNeedConsent(t *testing.T) {
	for _, spec := range []string{unrenamed, single} {
		g := NewWithT(t)
		s := karpenter(t, spec+declared)
		s.Pools[0].Limits["nvidia.com/gpu"] = "16"
		group := only(t, s)
		g.Expect(group.Reason).To(Equal(v1alpha1.ReasonGPUCountRises))
		g.Expect(group.Message).To(And(ContainSubstring("renameByDefault"), ContainSubstring("Multiply it by")))
		g.Expect(s.Advise().Writes).To(BeEmpty())
		s.Policies[0].Spec.Autoscaling.UnrenamedReplicas = v1alpha1.UnrenamedReplicasAnnounce
		capacity := asMap(asMap(s.Advise().Writes[0].Overlay.Object["spec"])["capacity"])
		g.Expect(capacity).To(HaveLen(1))
		g.Expect(capacity["nvidia.com/gpu"]).To(BeElementOf("16", "14"))
	}
}

func TestAnotherVersionOfTheKind(t *testing.T) {
	g := NewWithT(t)
	s := karpenter(t, renamed+declared)
	s.OverlayVersion = "karpenter.sh/v1beta1"
	g.Expect(s.Advise().Writes[0].Overlay.Object).To(HaveKeyWithValue("apiVersion", "karpenter.sh/v1beta1"))
	s.OverlayVersion = ""
	g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonOverlayNotServed))
	g.Expect(s.Advise().Writes).To(BeEmpty())
}

func TestWhatTheAPIServerRefuses(t *testing.T) {
	s := karpenter(t, renamed+declared)
	name := made(t, s).Name
	for reason, r := range map[string]autoscaling.Refusal{
		v1alpha1.ReasonNotPermitted: {Forbidden: true, Message: "no"}, v1alpha1.ReasonOwnedByOther: {Conflict: true, Message: "conflict with kubectl-edit"},
		v1alpha1.ReasonWriteFailed: {Message: "no"},
	} {
		s.Refused = map[string]autoscaling.Refusal{"NodeOverlay/" + name: r}
		group := only(t, s)
		NewWithT(t).Expect(group.Reason).To(Equal(reason))
		NewWithT(t).Expect(group.Message).To(And(ContainSubstring(r.Message), ContainSubstring(name)))
	}
}

func TestConditionOfGroups(t *testing.T) {
	g := NewWithT(t)
	of := func(reasons ...string) metav1.Condition {
		var groups []autoscaling.Group
		for _, r := range reasons {
			groups = append(groups, autoscaling.Group{NodeGroupStatus: v1alpha1.NodeGroupStatus{Kind: v1alpha1.NodeGroupNodePool, Name: "n-" + r, Reason: r, Message: "m"}})
		}
		c, requested := autoscaling.Condition(groups)
		g.Expect(requested).To(Equal(len(reasons) > 0))
		return c
	}
	of()
	g.Expect(of(v1alpha1.ReasonConfigured).Status).To(Equal(metav1.ConditionTrue))
	g.Expect(of(v1alpha1.ReasonConfigured, v1alpha1.ReasonConfiguring).Status).To(Equal(metav1.ConditionUnknown))
	worst := of(v1alpha1.ReasonAdviceOnly, v1alpha1.ReasonConfigured, v1alpha1.ReasonFeatureGateOff)
	g.Expect(worst.Reason).To(Equal(v1alpha1.ReasonFeatureGateOff))
	g.Expect(worst.Status).To(Equal(metav1.ConditionFalse))
	g.Expect(worst.Message).To(Equal("NodePool n-FeatureGateOff: m"))
	g.Expect(of(v1alpha1.ReasonAdviceOnly, v1alpha1.ReasonAdviceOnly).Message).To(ContainSubstring("1 more node group"))
}

var now = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

const (
	a100   = "NVIDIA-A100-SXM4-40GB"
	t4     = "Tesla-T4"
	shared = "nvidia.com/gpu.shared"
)

// policy is a policy with a spec in YAML.
func policy(t *testing.T, name, spec string) v1alpha1.GPUSharingPolicy {
	t.Helper()
	p := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(now)}}
	NewWithT(t).Expect(yaml.UnmarshalStrict([]byte(spec), &p.Spec)).To(Succeed())
	return p
}

// Strategies, each for a node with one GPU or more.
const (
	renamed   = "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}"
	unrenamed = "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}}"
	mps       = "sharing: {strategy: MPS, mps: {replicas: 4}, advertise: {renameByDefault: true}}"
	filled    = "sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}"
	single    = "sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g.5gb}]}}"
	layout    = "sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 2}, {profile: 3g.20gb, count: 1}]}]}}"
	exclusive = "sharing: {strategy: Exclusive}"
)

// node is a node with GPUs of a product.
func node(name, product string, count int, labels map[string]string) cluster.Node {
	n := cluster.Node{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name, "nvidia.com/gpu.present": "true"}, Annotations: map[string]string{}}
	maps.Copy(n.Labels, labels)
	for i := range count {
		n.GPU.Status.Devices = append(n.GPU.Status.Devices, v1alpha1.DeviceStatus{
			UUID: fmt.Sprintf("GPU-%s-%d", name, i), Index: int32(i), Product: product, MemoryMiB: 40960, ComputeCapability: "8.0", MIGCapable: product == a100,
			Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
		})
	}
	return n
}

func pool(name string, labels map[string]string) autoscaling.Pool {
	p := autoscaling.Pool{Name: name, Labels: map[string]string{"karpenter.sh/nodepool": name}, Limits: map[string]string{}}
	maps.Copy(p.Labels, labels)
	return p
}

// karpenter is a snapshot with NodePool gpu and NodeOverlays.
func karpenter(t *testing.T, spec string, nodes ...cluster.Node) autoscaling.Snapshot {
	t.Helper()
	return autoscaling.Snapshot{
		Now: now, Policies: []v1alpha1.GPUSharingPolicy{policy(t, "research", spec)}, Nodes: nodes,
		Pools: []autoscaling.Pool{pool("gpu", nil)}, OverlayVersion: autoscaling.KnownOverlayVersion,
	}
}

// inPool is the labels of a node of NodePool gpu.
func inPool(instanceType string) map[string]string {
	return map[string]string{"karpenter.sh/nodepool": "gpu", "node.kubernetes.io/instance-type": instanceType}
}

const declared = `
autoscaling: {mode: Manage, nodeShapes: [{product: NVIDIA-A100-SXM4-40GB, gpusPerNode: 2, instanceTypes: [gpu.two], nodeGroups: [{kind: NodePool, name: gpu}]}]}`

// only is the only group of policy research.
func only(t *testing.T, s autoscaling.Snapshot) autoscaling.Group {
	t.Helper()
	groups := s.Advise().Groups["research"]
	NewWithT(t).Expect(groups).To(HaveLen(1))
	return groups[0]
}

// offers are the resources of a group.
func offers(g autoscaling.Group) map[string]int64 {
	counts := map[string]int64{}
	for _, r := range g.Resources {
		counts[r.Name] = r.Count
	}
	return counts
}
