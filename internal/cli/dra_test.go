// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// ofDRA is an object of resource.k8s.io/v1.
func ofDRA(kind, namespace, name string, content map[string]any) unstructured.Unstructured {
	o := unstructured.Unstructured{Object: content}
	o.SetAPIVersion(draGroup + "/v1")
	o.SetKind(kind)
	o.SetNamespace(namespace)
	o.SetName(name)
	return o
}

// published is the ResourceSlice by which NVIDIA's DRA driver v0.5.0 shows the GPUs of a node.
func published(n *cluster.Node, shares int64) unstructured.Unstructured {
	devices := []any{}
	add := func(name, uuid string, more map[string]any) {
		attributes := map[string]any{"uuid": map[string]any{"string": uuid}}
		for name, value := range more {
			attributes[name] = map[string]any{"string": value}
		}
		d := map[string]any{"name": name, "attributes": attributes}
		if shares > 1 {
			d["allowMultipleAllocations"] = true
			d["capacity"] = map[string]any{"shares": map[string]any{"value": fmt.Sprint(shares)}}
		}
		devices = append(devices, d)
	}
	for i := range n.GPU.Status.Devices {
		d := &n.GPU.Status.Devices[i]
		if d.Sharing.MIGMode == v1alpha1.MIGModeDisabled {
			add(fmt.Sprintf("gpu-%d", d.Index), d.UUID, map[string]any{"type": "gpu"})
		}
		for _, instance := range d.Instances {
			name := fmt.Sprintf("gpu-%d-mig-%s-19-%d", d.Index, strings.ReplaceAll(instance.Profile, ".", ""), instance.Start)
			add(name, instance.UUID, map[string]any{"type": "mig", "profile": instance.Profile, "parentUUID": d.UUID})
		}
	}
	return ofDRA(kindSlice, "", n.Name+"-gpus", map[string]any{"spec": map[string]any{
		"driver": dra.DriverName, "nodeName": n.Name, "devices": devices,
		"pool": map[string]any{"name": n.Name, "generation": int64(1), "resourceSliceCount": int64(1)},
	}})
}

// claimed is the ResourceClaim that the scheduler makes for a pod which requests an extended resource.
func claimed(node, pod, device string) unstructured.Unstructured {
	claim := ofDRA(kindClaim, "team", pod+"-extended-resources", map[string]any{
		"spec": map[string]any{"devices": map[string]any{"requests": []any{map[string]any{
			"name": "container-0-request-0", "exactly": map[string]any{"deviceClassName": dra.DriverName, "allocationMode": "ExactCount", "count": int64(1)},
		}}}},
		"status": map[string]any{
			"allocation": map[string]any{"devices": map[string]any{"results": []any{map[string]any{
				"request": "container-0-request-0", "driver": dra.DriverName, "pool": node, "device": device,
			}}}},
			"reservedFor": []any{map[string]any{"resource": "pods", "name": pod, "uid": "uid-" + pod}},
		},
	})
	claim.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod, UID: types.UID("uid-" + pod), Controller: new(true)}})
	return claim
}

// ofChart is the class of the driver's chart.
func ofChart() unstructured.Unstructured {
	return ofDRA(kindClass, "", dra.DriverName, map[string]any{"spec": map[string]any{
		"extendedResourceName": "nvidia.com/gpu",
		"selectors":            []any{map[string]any{"cel": map[string]any{"expression": "device.driver == 'gpu.nvidia.com'"}}},
	}})
}

// inCluster are these objects in a cluster of Kubernetes 1.37.
func inCluster(objects ...unstructured.Unstructured) driverObjects {
	o := driverObjects{of: map[string][]unstructured.Unstructured{}, served: map[string]string{}, unread: map[string]bool{}}
	for _, w := range withoutDRA {
		o.served[w.kind] = "v1"
	}
	for _, object := range objects {
		o.of[object.GetKind()] = append(o.of[object.GetKind()], object)
	}
	return o
}

// driven is a node that NVIDIA's DRA driver alone serves.
func driven(t *testing.T, n cluster.Node) cluster.Node {
	t.Helper()
	n.Labels[deployPlugin], n.Allocatable = cluster.LabelFalse, map[string]int64{}
	n.Pods = append(n.Pods, cluster.Pod{Namespace: "nvidia-dra", Name: "kubelet-plugin-" + n.Name, UID: "dra-" + n.Name, Controller: "DaemonSet", DRA: true, Serves: true})
	return n
}

// holdByClaim lets a pod hold one GPU by a claim, which the agent reports as any GPU and instance of the node.
func holdByClaim(n *cluster.Node, pod string) {
	n.Pods = append(n.Pods, cluster.Pod{Namespace: "team", Name: pod, UID: "uid-" + pod, GPU: true, Controller: "ReplicaSet"})
	for i := range n.GPU.Status.Devices {
		d := &n.GPU.Status.Devices[i]
		d.Holders = append(d.Holders, v1alpha1.HolderStatus{Namespace: "team", PodName: pod, ContainerName: "main"})
		for _, instance := range d.Instances {
			d.Holders = append(d.Holders, v1alpha1.HolderStatus{Namespace: "team", PodName: pod, ContainerName: "main", Instance: new(instance.ID)})
		}
	}
}

// bothStacks is a cluster in which the device plugin serves node p, and NVIDIA's DRA driver node d.
func bothStacks(t *testing.T, shares int64) cluster.Snapshot {
	t.Helper()
	p, d := newNode(t, "p", sim.A100), driven(t, newNode(t, "d", sim.A100, sim.A100))
	p.Pods = append(p.Pods, cluster.Pod{Namespace: "gpu-operator", Name: "plugin", NVIDIA: true, NodeSelector: map[string]string{deployPlugin: "true"}, Controller: "DaemonSet", Serves: true})
	holdByClaim(&d, "train")
	s := snapshotOf(p, d)
	o := inCluster(published(&d, shares), claimed("d", "train", "gpu-1"), ofChart())
	NewWithT(t).Expect(o.tell(&s)).To(BeEmpty())
	return s
}

func TestPlanShowsTheStackOfEachNodeAndWhatAMoveWouldChange(t *testing.T) {
	for name, test := range map[string]struct {
		policy string
		shares int64
	}{
		"MIG on both stacks":                    {policy: fmt.Sprintf(toMIG, "Evict"), shares: 1},
		"MIG on one GPU beside shares":          {policy: `{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g.5gb}]}}}`, shares: 4},
		"time-slicing on both stacks":           {policy: slicing, shares: 1},
		"time-slicing as the DRA driver is set": {policy: slicing, shares: 4},
		"MPS on both stacks":                    {policy: `{sharing: {strategy: MPS, mps: {replicas: 4}}}`, shares: 1},
		"MIG strategy single on both stacks":    {policy: `{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g.5gb}]}}}`, shares: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := bothStacks(t, test.shares)
			compare(t, "plan "+name, func(shown *text) {
				shown.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "all", test.policy)}})
			})
		})
	}
}

// TestPlanSaysNothingOfStacksWhereThereIsOne: the device plugin, unless the user asks what a move would change.
func TestPlanSaysNothingOfStacksWhereThereIsOne(t *testing.T) {
	g := NewWithT(t)
	s := snapshotOf(newNode(t, "p", sim.T4))
	shown := text{}
	shown.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "all", slicing)}})
	g.Expect(shown.String()).NotTo(ContainSubstring("STACK"))
	o := inCluster()
	g.Expect(o.tell(&s)).To(BeEmpty())
	shown = text{}
	shown.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "all", slicing)}})
	g.Expect(shown.String()).NotTo(ContainSubstring("STACK"), "any Kubernetes from 1.34 on could have the driver")
	shown = text{}
	shown.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "all", slicing)}, otherStack: true})
	g.Expect(shown.String()).To(ContainSubstring("STACK NVIDIA's device plugin on 1 node: p\n  if moved     to NVIDIA's DRA driver: the same resources, with"))
}

// TestStatusShowsADRANodeAsOthers: what its ResourceSlices publish, and which pod has what by its claim.
func TestStatusShowsADRANodeAsOthers(t *testing.T) {
	a := driven(t, partitioned(t))
	holdByClaim(&a, "train")
	a.GPU.Status.Rollout.Blockers = []v1alpha1.BlockerStatus{{
		Kind: v1alpha1.BlockerKindResourceClaim, Namespace: "team", Name: "reserved", DeviceUUID: a.GPU.Status.Devices[0].UUID, Handling: "delete it",
	}}
	both := newNode(t, "b", sim.T4)
	both.Pods = append(both.Pods, cluster.Pod{Name: "dra", DRA: true})
	s := snapshotOf(a, both)
	second := ""
	for _, i := range a.GPU.Status.Devices[0].Instances {
		if i.Profile == "2g.10gb" {
			second = fmt.Sprintf("gpu-0-mig-2g10gb-19-%d", i.Start)
		}
	}
	o := inCluster(published(&s.Nodes[0], 1), claimed("a", "train", second), ofChart())
	NewWithT(t).Expect(o.tell(&s)).To(BeEmpty())
	compare(t, "status of nodes on the DRA driver", func(shown *text) { shown.status(s, query{all: true}) })
	card := sight{snapshot: s}.page().Nodes[0]
	NewWithT(t).Expect(card.Notes).To(ContainElement("Offered by NVIDIA's DRA driver"))
	NewWithT(t).Expect(card.Resources).To(HaveLen(3))
}

// TestWhatAUserMayNotReadIsSaid, and nothing else is claimed in its place.
func TestWhatAUserMayNotReadIsSaid(t *testing.T) {
	g := NewWithT(t)
	d := driven(t, newNode(t, "d", sim.A100))
	s := snapshotOf(d)
	o := inCluster()
	for _, without := range withoutDRA {
		o.unread[without.kind] = true
	}
	lacks := o.tell(&s)
	g.Expect(lacks).To(HaveLen(len(withoutDRA)))
	shown := text{}
	shown.lacking(lacks)
	shown.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "all", slicing)}})
	g.Expect(shown.String()).To(And(ContainSubstring("You may not list ResourceSlices"), ContainSubstring("gpu-sharing-cli"),
		ContainSubstring("afterwards   nvidia.com/gpu: 4"), Not(ContainSubstring("No DeviceClass serves")), Not(ContainSubstring(v1alpha1.ReasonDRASharesDiffer))))

	s = snapshotOf(newNode(t, "p", sim.A100))
	g.Expect(o.tell(&s)).To(BeEmpty(), "nothing depends on it where the device plugin serves all nodes")
}

// TestANodeWhoseDriverIsAwayStaysADRANode: its DaemonSet is still there, as the controller has recorded.
func TestANodeWhoseDriverIsAwayStaysADRANode(t *testing.T) {
	g := NewWithT(t)
	d := driven(t, newNode(t, "d", sim.A100))
	d.Pods = nil
	s, o := snapshotOf(d), inCluster()
	o.tell(&s)
	g.Expect(s.Plugin.StackOf(&s.Nodes[0])).To(Equal(dra.DevicePlugin))
	d.Annotations = map[string]string{v1alpha1.AnnotationOtherController: v1alpha1.ReasonDRADriverActive}
	s = snapshotOf(d)
	o.tell(&s)
	g.Expect(s.Plugin.StackOf(&s.Nodes[0])).To(Equal(dra.DRADriver))
}

// TestCommandsReadNVIDIAsDRADriver of a real API server, with the rights of the user.
func TestCommandsReadNVIDIAsDRADriver(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t, env.WithNVIDIA())
	n := driven(t, partitioned(t))
	n.Pods = nil
	populate(t, cluster.Client, n)
	create := func(o unstructured.Unstructured) {
		status, has := o.Object["status"]
		g.Expect(cluster.Client.Create(t.Context(), &o)).To(Succeed())
		if has {
			o.Object["status"] = status
			g.Expect(cluster.Client.Status().Update(t.Context(), &o)).To(Succeed())
		}
	}
	pod := func(namespace, name string, labels map[string]string, container string) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels},
			Spec:       corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{{Name: container, Image: "example.invalid/driver:v0.4.0"}}},
		}
		if container == "gpus" {
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "driver", UID: "driver", Controller: new(true)}}
			p.Spec.Volumes = []corev1.Volume{{Name: "plugins", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/plugins"}}}}
		}
		g.Expect(cluster.Client.Create(t.Context(), p)).To(Succeed())
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		g.Expect(cluster.Client.Status().Update(t.Context(), p)).To(Succeed())
		return p
	}
	pod("default", "kubelet-plugin", map[string]string{"dra-driver-nvidia-gpu-component": "kubelet-plugin"}, "gpus")
	train := pod("team", "train", nil, "main")
	claim := claimed("a", "train", fmt.Sprintf("gpu-0-mig-2g10gb-19-%d", 0))
	g.Expect(unstructured.SetNestedSlice(claim.Object, []any{map[string]any{"resource": "pods", "name": "train", "uid": string(train.UID)}}, "status", "reservedFor")).To(Succeed())
	for _, o := range []unstructured.Unstructured{published(&n, 1), ofChart(), claim} {
		create(o)
	}
	bindRoles(t, cluster.Client, map[string][]string{"reader": {"gpu-sharing-view", "gpu-sharing-cli", "gpu-sharing-edit"}})
	run := func(user string, args ...string) (string, error) {
		var out strings.Builder
		p := &Program{In: strings.NewReader(research), Out: &out, Clock: clocktesting.NewFakeClock(now), Width: 0}
		err := p.Run(t.Context(), append(args, "--kubeconfig", kubeconfigOf(t, cluster.Config, user)))
		return out.String(), failure(err)
	}
	g.Eventually(func() error { _, err := run("reader", "status"); return err }).WithTimeout(time.Minute).Should(Succeed())

	status, err := run("reader", "status", "a")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(status).To(And(ContainSubstring("stack        NVIDIA's DRA driver"), ContainSubstring("advertises   nvidia.com/mig-1g.5gb: 1, nvidia.com/mig-2g.10gb: 1, nvidia.com/mig-3g.20gb: 1"),
		ContainSubstring("|team/train"), Not(ContainSubstring("You may not list"))))
	planned, err := run("reader", "plan", "-f", "-")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(planned).To(And(ContainSubstring("STACK NVIDIA's DRA driver on 1 node: a\n  if moved     to NVIDIA's device plugin: the same resources"),
		ContainSubstring("classes      creates DeviceClass gpusharing-mig-2g.10gb, by which pods get nvidia.com/mig-2g.10gb")))
	doctor, err := run("reader", "doctor")
	g.Expect(err).To(MatchError(ErrUnhealthy), "no controller runs")
	g.Expect(doctor).To(And(ContainSubstring("warning      NVIDIA's DRA driver is v0.4.0. Version v0.5.0 was tested"), Not(ContainSubstring("no pod of NVIDIA's device plugin"))))
	described, err := run("reader", "import")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(described).To(And(ContainSubstring("profile: 3g.20gb"), ContainSubstring("no DeviceClass serves nvidia.com/mig-1g.5gb"), Not(ContainSubstring("--configmap"))))

	role := &unstructured.Unstructured{}
	role.SetAPIVersion("rbac.authorization.k8s.io/v1")
	role.SetKind("ClusterRole")
	g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: "gpu-sharing-cli"}, role)).To(Succeed())
	rules, _, _ := unstructured.NestedSlice(role.Object, "rules")
	kept := []any{}
	for _, rule := range rules {
		if groups, _, _ := unstructured.NestedStringSlice(rule.(map[string]any), "apiGroups"); groups[0] != draGroup {
			kept = append(kept, rule)
		}
	}
	g.Expect(unstructured.SetNestedSlice(role.Object, kept, "rules")).To(Succeed())
	g.Expect(cluster.Client.Update(t.Context(), role)).To(Succeed())
	g.Eventually(func() string { out, _ := run("reader", "plan", "-f", "-"); return out }).WithTimeout(time.Minute).Should(And(
		ContainSubstring("You may not list ResourceSlices"), ContainSubstring("You may not list ResourceClaims"), ContainSubstring("You may not list DeviceClasses"),
		ContainSubstring("afterwards   nvidia.com/mig-2g.10gb: 3")))
}

// TestRestoreNamesWhatIsLeftOfTheOperatorsClassesAndTaintRules.
func TestRestoreNamesWhatIsLeftOfTheOperatorsClassesAndTaintRules(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	class := dra.NewClass(dra.ForInstances("1g.5gb"))
	rule, other := dra.NewTaintRule("a", now), ofChart()
	class.SetGroupVersionKind(kindOf(draGroup, "v1", kindClass))
	rule.SetGroupVersionKind(kindOf(draGroup, "v1", kindTaintRule))
	for _, o := range []*unstructured.Unstructured{class, rule, &other} {
		g.Expect(cluster.Client.Create(t.Context(), o)).To(Succeed())
	}
	left, err := leftOfDRA(t.Context(), cluster.Client)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(left).To(ConsistOf(HavePrefix("deviceclass/gpusharing-mig-1g.5gb of the operator exists"), HavePrefix("devicetaintrule/gpusharing-a of the operator exists")))
	err = restoration{Program: &Program{Out: &strings.Builder{}, Clock: clocktesting.NewFakeClock(now)}, client: cluster.Client}.withoutKinds(t.Context())
	g.Expect(err).To(MatchError(ContainSubstring("devicetaintrule/gpusharing-a of the operator exists")), "also where the operator's kinds are gone")
}

// TestANodeWithoutLabelsCanBeMovedInThought: the page of the dashboard previews policies for such nodes too.
func TestANodeWithoutLabelsCanBeMovedInThought(t *testing.T) {
	s := cluster.Snapshot{Plugin: cluster.DevicePlugin{ClusterPolicy: true}, Nodes: []cluster.Node{{Name: "bare"}}}
	moved := movedOver(s)
	NewWithT(t).Expect(moved.Plugin.StackOf(&moved.Nodes[0])).To(Equal(dra.DRADriver))
	NewWithT(t).Expect(s.Nodes[0].Labels).To(BeNil(), "the snapshot that was read stays as it is")
}

// TestTheStackOfANodeIsTheControllersWhereTheGPUOperatorRunsNoDevicePlugin: its ClusterPolicy has devicePlugin.enabled
// false, and its nodes have nvidia.com/gpu.deploy.device-plugin=true all the same (NVIDIA/gpu-operator
// controllers/state_manager.go sets it on each GPU node). The controller takes them for nodes of the driver, since
// pluginconfig reports ClusterPolicy false.
func TestTheStackOfANodeIsTheControllersWhereTheGPUOperatorRunsNoDevicePlugin(t *testing.T) {
	g := NewWithT(t)
	scheme, err := newScheme()
	g.Expect(err).NotTo(HaveOccurred())
	kind := clusterPolicyKind()
	scheme.AddKnownTypeWithName(kind, &unstructured.Unstructured{})
	scheme.AddKnownTypeWithName(kind.GroupVersion().WithKind(kind.Kind+"List"), &unstructured.UnstructuredList{})
	disabled := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"devicePlugin": map[string]any{"enabled": false}}}}
	disabled.SetGroupVersionKind(kind)
	disabled.SetName("cluster-policy")
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(disabled).Build()

	a := driven(t, newNode(t, "a", sim.A100))
	a.Labels[deployPlugin] = cluster.LabelTrue
	s := snapshotOf(a)
	o := inCluster(published(&a, 1), ofChart())
	g.Expect(o.tell(&s)).To(BeEmpty())
	g.Expect(readClusterPolicy(t.Context(), c, &s)).To(Succeed())
	g.Expect(s.Plugin.StackOf(&s.Nodes[0])).To(Equal(dra.DRADriver))
}

// TestRestoreSaysThatAClassStaysBesideAnother: the operator deletes none of its own beside another of the same
// resource, since the scheduler would forget the resource.
func TestRestoreSaysThatAClassStaysBesideAnother(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	class, other := dra.NewClass(dra.ForGPUs()), ofChart()
	class.SetGroupVersionKind(kindOf(draGroup, "v1", kindClass))
	for _, o := range []*unstructured.Unstructured{class, &other} {
		g.Expect(cluster.Client.Create(t.Context(), o)).To(Succeed())
	}
	left, err := leftOfDRA(t.Context(), cluster.Client)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(left).To(ConsistOf(ContainSubstring("it stays beside gpu.nvidia.com, which serves the same resource, because the scheduler would forget that. Delete it, then have the " +
		"scheduler read the other one again: kubectl delete deviceclass gpusharing-gpu && kubectl annotate deviceclass gpu.nvidia.com --overwrite read-again=")))
}

// On a node of NVIDIA's DRA driver the operator refuses MPS, and instances that are named nvidia.com/gpu (NotOnDRA): neither is advised there.
func TestAdviceForANodeOfTheDRADriverIsNotRefusedThere(t *testing.T) {
	for name, models := range map[string][]sim.Model{"A100": {sim.A100, sim.A100}, "T4": {sim.T4, sim.T4}} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			d := driven(t, newNode(t, "d", models...))
			s := snapshotOf(d)
			o := inCluster(published(&d, 1), ofChart())
			g.Expect(o.tell(&s)).To(BeEmpty())
			c := advice.Cluster{
				Nodes: s.Nodes, Plugin: s.Plugin, MinAge: 24 * time.Hour, Seen: advice.FromPrometheus(seenOn("d", "infer-0", "infer-1", "infer-2", "infer-3"), now),
			}
			all, err := advice.Of(c)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(all[0].Policy).NotTo(BeNil(), "%s %+v", all[0].NoPolicy, all[0].Options)
			admitted := policy(t, all[0].Policy.Name, slicing)
			admitted.Spec.Sharing, admitted.Spec.GPUSelector = all[0].Policy.Spec.Sharing, all[0].Policy.Spec.GPUSelector
			preview := text{width: 110}
			preview.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{admitted}})
			g.Expect(preview.String()).NotTo(ContainSubstring(v1alpha1.ReasonNotOnDRA))
		})
	}
}
