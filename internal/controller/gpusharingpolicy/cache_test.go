// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestSlimPods: what is left of a pod in the cache says the same to everything that reads pods.
func TestSlimPods(t *testing.T) {
	yes := true
	shares := corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu.shared": resource.MustParse("1")}}
	c := New(nil, Options{Namespace: "own", PluginConfig: pluginconfig.New(nil, nil, nil, pluginconfig.StandAlone{})})
	for name, change := range map[string]func(*corev1.Pod){
		"a bystander": func(*corev1.Pod) {},
		"one with a GPU in a container": func(p *corev1.Pod) {
			p.Spec.Containers = []corev1.Container{{Name: "a"}, {Name: "b", Resources: shares}}
		},
		"one with a GPU in an init container": func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "a", Resources: shares}}
		},
		"one with no GPU in a container and in an init container": func(p *corev1.Pod) {
			none := corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("0")}}
			p.Spec.Containers, p.Spec.InitContainers = []corev1.Container{{Name: "a", Resources: none}}, []corev1.Container{{Name: "b", Resources: none}}
		},
		"one with a GPU for the whole pod": func(p *corev1.Pod) { p.Spec.Resources = &shares },
		"one of a DaemonSet": func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "Other"}, {Kind: "DaemonSet", Controller: &yes}}
		},
		"a mirror": func(p *corev1.Pod) { p.Annotations[corev1.MirrorPodAnnotationKey] = "x" },
		"one of NVIDIA's operands that reads our ConfigMap": func(p *corev1.Pod) {
			p.Namespace, p.Annotations[v1alpha1.AnnotationSync] = "gpu-operator", "key@1"
			p.Spec.NodeSelector = map[string]string{"nvidia.com/gpu.deploy.device-plugin": "true"}
			p.Spec.Volumes = []corev1.Volume{{Name: "x", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: pluginconfig.ConfigMapName},
			}}}}
		},
		"one of NVIDIA's operands whose config-manager keeps ending": func(p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{"nvidia.com/gpu.deploy.device-plugin": "true"}
			ended := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
				ExitCode: 1, FinishedAt: metav1.Unix(1_800_000_000, 0), Message: "a long text",
			}}
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "config-manager-init", Ready: true, Image: "an image"}}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{
				{Name: "config-manager", RestartCount: 3, LastTerminationState: ended, Image: "an image"},
				{Name: "nvidia-device-plugin", Ready: true, Image: "an image"},
			}
		},
		"one that projects our ConfigMap": func(p *corev1.Pod) {
			p.Namespace = "gpu-operator"
			p.Spec.Volumes = []corev1.Volume{{Name: "x", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
				Sources: []corev1.VolumeProjection{{ConfigMap: &corev1.ConfigMapProjection{
					LocalObjectReference: corev1.LocalObjectReference{Name: pluginconfig.ConfigMapName},
				}}},
			}}}}
		},
		"the kubelet plugin of NVIDIA's DRA driver": func(p *corev1.Pod) {
			p.Labels["nvidia-dra-driver-gpu-component"] = "kubelet-plugin"
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "compute-domains"}, corev1.Container{Name: "gpus"})
		},
		"that plugin with feature gates": func(p *corev1.Pod) {
			p.Labels["dra-driver-nvidia-gpu-component"] = "kubelet-plugin"
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{
				Name: "gpus", Env: []corev1.EnvVar{{Name: "FEATURE_GATES", Value: "MPSSupport=true,TimeSlicingSettings=true,DynamicMIG=true"}},
			})
		},
		"one of a PodGroup that has a ResourceClaim": func(p *corev1.Pod) {
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("train")}}
			p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: new("gang")}
		},
		"an agent": func(p *corev1.Pod) {
			p.Namespace, p.Labels[cluster.LabelName] = "own", "gpu-sharing-agent"
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
		},
		"one that tolerates every taint": func(p *corev1.Pod) {
			p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		},
		"one of a DaemonSet that tolerates every taint": func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Controller: &yes}}
			p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		},
		"one that waits for a MIG instance": func(p *corev1.Pod) {
			p.Spec.NodeName, p.Spec.Priority = "", new(int32(7))
			p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/mig-1g.5gb": resource.MustParse("1")}}}}
			p.Spec.Tolerations = []corev1.Toleration{{Key: "a", Operator: corev1.TolerationOpExists}}
			p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{}, NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpExists}},
				}}},
			}}
			p.Status.Phase, p.Status.NominatedNodeName = corev1.PodPending, "a"
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/5 nodes"}}
		},
		"the controller":     func(p *corev1.Pod) { p.Namespace, p.Labels[cluster.LabelName] = "own", "gpu-sharing-controller" },
		"one that has ended": func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed },
	} {
		t.Run(name, func(t *testing.T) {
			g, pod := NewWithT(t), usualPod()
			change(pod)
			slim, err := slimPod(pod.DeepCopy())
			g.Expect(err).NotTo(HaveOccurred())
			ours := types.NamespacedName{Namespace: "gpu-operator", Name: pluginconfig.ConfigMapName}
			for _, programs := range []*cluster.Programs{{ConfigMap: ours}, {ConfigMap: ours, Unverified: true}} {
				g.Expect(cluster.PodOf(slim.(*corev1.Pod), programs)).To(Equal(cluster.PodOf(pod, programs)))
			}
			if kept := slim.(*corev1.Pod); name == "one that waits for a MIG instance" {
				g.Expect(kept.Spec.Affinity.NodeAffinity).To(Equal(pod.Spec.Affinity.NodeAffinity))
				g.Expect([]any{kept.Spec.Priority, kept.Spec.Tolerations}).To(Equal([]any{pod.Spec.Priority, pod.Spec.Tolerations}))
				g.Expect(demand.Waits(kept)).To(BeFalse(), "it is nominated")
				kept.Status.NominatedNodeName = ""
				g.Expect(demand.Waits(kept)).To(BeTrue())
				kept.Status.NominatedNodeName = "a"
			}
			view, matters := c.podView(pod)
			slimView, slimMatters := c.podView(slim.(*corev1.Pod))
			g.Expect(slimView).To(Equal(view))
			g.Expect(slimMatters).To(Equal(matters))
			g.Expect(matters).To(Equal(!slices.Contains([]string{
				"a bystander", "a mirror", "one of a DaemonSet", "one that has ended", "one that tolerates every taint",
				"one of a DaemonSet that tolerates every taint", "the controller", "one with no GPU in a container and in an init container",
			}, name)))
			g.Expect(slim.(*corev1.Pod).Size()).To(BeNumerically("<", pod.Size()/2))
			again, err := slimPod(slim.(*corev1.Pod).DeepCopy())
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(again).To(Equal(slim))
		})
	}
}

// TestSlimClasses: what is left of a DeviceClass in the cache tells the same.
func TestSlimClasses(t *testing.T) {
	g := NewWithT(t)
	class := &unstructured.Unstructured{}
	g.Expect(yaml.Unmarshal([]byte(`{apiVersion: resource.k8s.io/v1, kind: DeviceClass,
		metadata: {name: gpu.nvidia.com, creationTimestamp: "2026-11-22T10:00:00Z", labels: {app.kubernetes.io/managed-by: gpu-sharing-operator, team: a},
			annotations: {gpusharing.io/beside: theirs, others: a}},
		spec: {extendedResourceName: nvidia.com/gpu, selectors: [{cel: {expression: "device.driver == 'gpu.nvidia.com'"}}],
			config: [{opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig,
				sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}}}}]}}`), &class.Object)).To(Succeed())
	slim, err := slimOthers(class.DeepCopy())
	g.Expect(err).NotTo(HaveOccurred())
	of := dra.ClassOf(slim.(*unstructured.Unstructured))
	g.Expect(of).To(Equal(dra.ClassOf(class)))
	g.Expect(of).To(And(HaveField("Interval", "Long"), HaveField("Own", true), HaveField("Beside", "theirs"), HaveField("Resource", "nvidia.com/gpu"),
		HaveField("Age", Not(BeZero()))))
	g.Expect(slim.(*unstructured.Unstructured).Object["spec"]).To(HaveKey("selectors"), "which tell whether another controller edited one of the operator's")
	class.SetLabels(nil)
	slim, err = slimOthers(class.DeepCopy())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(slim.(*unstructured.Unstructured).Object["spec"]).NotTo(HaveKey("selectors"))
}

// usualPod has what every pod has.
func usualPod() *corev1.Pod {
	secret := &corev1.SecretVolumeSource{SecretName: "a-token-of-a-service-account-as-every-pod-has-one"}
	env := []corev1.EnvVar{{Name: "A_VARIABLE_WITH_A_LONG_NAME", Value: "and a value that is longer than the name of the variable"}}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "pod", UID: "1-2-3", Labels: map[string]string{"app": "pod", "pod-template-hash": "76c5f9f5c9"},
			Annotations:   map[string]string{"others.example/config": "a long text that nobody here reads, again and again and again"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubelet", FieldsV1: metav1.NewFieldsV1(strings.Repeat(" ", 2000))}},
		},
		Spec: corev1.PodSpec{
			NodeName: "a100", ServiceAccountName: "default",
			Containers: []corev1.Container{{Name: "main", Image: "registry.example/some/image:v1", Env: env}},
			Volumes:    []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Secret: secret}}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: "10.0.0.1",
			Conditions: []corev1.PodCondition{{
				Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Unix(1_800_000_000, 0)),
			}},
		},
	}
}

func TestSlimNodes(t *testing.T) {
	g := NewWithT(t)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: "a100", UID: "1", ResourceVersion: "7", Labels: map[string]string{"pool": "research"},
			Annotations: map[string]string{
				"others.example/x": "x", v1alpha1.AnnotationStopped: "p", "nvidia.com/gpu-driver-upgrade-enabled": "true",
			},
		},
		Spec: corev1.NodeSpec{ProviderID: "x", Taints: []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoExecute}}},
		Status: corev1.NodeStatus{
			Allocatable: corev1.ResourceList{"cpu": resource.MustParse("64"), "nvidia.com/gpu": resource.MustParse("8")},
			Images:      []corev1.ContainerImage{{Names: []string{"image"}}},
		},
	}
	slim, err := slimNode(node.DeepCopy())
	g.Expect(err).NotTo(HaveOccurred())
	want, _ := nodeView(node)
	got, _ := nodeView(slim.(*corev1.Node))
	g.Expect(got).To(Equal(want))
	g.Expect(got.Allocatable).To(Equal(map[string]int64{"nvidia.com/gpu": 8}))
	g.Expect(got.Annotations).To(HaveLen(2))
	g.Expect(slim.(*corev1.Node).ResourceVersion).To(Equal("7"))
	g.Expect(slim.(*corev1.Node).Status.Images).To(BeEmpty())
}

// TestSlimNodesTellTheMachineThatTheyBelongTo: by it a new node gets the startup taint that Cluster Autoscaler waits
// for.
// TestSlimGPUNodes: a GPUNode in the cache says what it said, and its GPUs are listed once where three lists are the same.
func TestSlimGPUNodes(t *testing.T) {
	g := NewWithT(t)
	devices := func(mode v1alpha1.MIGMode) []v1alpha1.DeviceSpec {
		return []v1alpha1.DeviceSpec{{UUID: "GPU-1", Sharing: v1alpha1.DeviceSharing{MIGMode: mode}}, {UUID: "GPU-2"}}
	}
	for _, found := range []v1alpha1.MIGMode{v1alpha1.MIGModeDisabled, v1alpha1.MIGModeEnabled} {
		node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
		node.Spec.Devices, node.Spec.Baseline = devices(v1alpha1.MIGModeDisabled), &v1alpha1.Baseline{Devices: devices(found)}
		node.Status.Rollout.LastGood = &v1alpha1.NodeSharing{Devices: devices(v1alpha1.MIGModeDisabled)}
		node.Status.Devices = []v1alpha1.DeviceStatus{{UUID: "GPU-2", Product: "A100", ComputeMode: v1alpha1.ComputeModeDefault}, {UUID: "GPU-3"}}
		node.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Ready", Message: "yes"}}
		want := node.DeepCopy()
		node.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "gpusharing-agent"}, {Manager: fieldManager}, {Manager: "kubectl"}}
		want.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: fieldManager}}

		slim, err := slimGPUNode(node)
		g.Expect(slim, err).To(Equal(want))
		same := func(a, b []v1alpha1.DeviceSpec) bool { return &a[0] == &b[0] }
		g.Expect(same(node.Spec.Devices, node.Status.Rollout.LastGood.Devices)).To(BeTrue())
		g.Expect(same(node.Spec.Devices, node.Spec.Baseline.Devices)).To(Equal(found == v1alpha1.MIGModeDisabled))
	}
}

// TestPodsThatAskForTheSameShareIt: and others do not, though their labels or amounts look alike.
func TestPodsThatAskForTheSameShareIt(t *testing.T) {
	g := NewWithT(t)
	slim := func(gpus, pool string) *corev1.Pod {
		pod := &corev1.Pod{Spec: corev1.PodSpec{NodeSelector: map[string]string{"pool": pool}, Containers: []corev1.Container{
			{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(gpus)}}},
		}}}
		_, err := slimPod(pod)
		g.Expect(err).NotTo(HaveOccurred())
		return pod
	}
	first, same, other := slim("1", "a"), slim("1", "a"), slim("2", `a" "b`)
	g.Expect(reflect.ValueOf(same.Spec.NodeSelector).Pointer()).To(Equal(reflect.ValueOf(first.Spec.NodeSelector).Pointer()))
	g.Expect(reflect.ValueOf(same.Spec.Resources.Limits).Pointer()).To(Equal(reflect.ValueOf(first.Spec.Resources.Limits).Pointer()))
	g.Expect(other.Spec.NodeSelector).To(HaveKeyWithValue("pool", `a" "b`))
	g.Expect(cluster.GPURequests(&other.Spec)).To(Equal(map[string]int64{"nvidia.com/gpu": 2}))
	for i := range mostRepeated + 1 {
		slim("1", strconv.Itoa(i))
	}
	g.Expect(len(repeatedLabels.known)).To(BeNumerically("<=", mostRepeated))
}

func TestSlimNodesTellTheMachineThatTheyBelongTo(t *testing.T) {
	for _, name := range []string{"cluster.x-k8s.io/machine", "machine.openshift.io/machine"} {
		g := NewWithT(t)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a100", Annotations: map[string]string{name: "gpu-1"}}}
		without, _ := nodeView(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a100"}})
		slim, err := slimNode(node.DeepCopy())
		g.Expect(err).NotTo(HaveOccurred())
		got, _ := nodeView(slim.(*corev1.Node))
		g.Expect(got.Annotations).To(HaveKeyWithValue(name, "gpu-1"))
		g.Expect(got).NotTo(Equal(without), "that the annotation comes triggers a reconcile")
	}
}

// TestSlimNodesTellSinceWhenAnotherControllerWorks: of the managed fields only those are kept that tell it, and only
// while a label reports that. What the operator writes later begins nothing anew, that of others does.
func TestSlimNodesTellSinceWhenAnotherControllerWorks(t *testing.T) {
	const label = "nvidia.com/gpu.deploy.dcgm"
	at := metav1.Unix(1_800_000_000, 0)
	own, later := metav1.Unix(1_800_000_030, 0), metav1.Unix(1_800_000_060, 0)
	for _, is := range []struct {
		value, record string
		since         time.Time
	}{
		{"true", "", time.Time{}},
		{"", "", time.Time{}},
		{"true", label + ",since@1799999000", time.Time{}},
		{"paused-for-mig-change", label, own.Time}, // a record of an earlier version
		{"paused-for-mig-change", label + ",since@1799999000", at.Time},
		{"paused-for-mig-change", label + ",since@1800000010", time.Unix(1_800_000_010, 0)},
	} {
		g := NewWithT(t)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Annotations: map[string]string{v1alpha1.AnnotationStopped: is.record},
			Labels:      map[string]string{label: is.value}, ManagedFields: []metav1.ManagedFieldsEntry{
				{Manager: "mig-manager", Time: &at, FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:` + label + `":{}}}}`)},
				{Manager: "gpusharing-controller", Time: &own, FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:` + label + `":{}}}}`)},
				{Manager: "kubelet", Time: &later, FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:other":{}}}}`)},
			},
		}}
		full, _ := nodeView(node)
		slim, err := slimNode(node.DeepCopy())
		g.Expect(err).NotTo(HaveOccurred())
		view, _ := nodeView(slim.(*corev1.Node))
		g.Expect(view).To(Equal(full))
		g.Expect(view.MarkedAtWorkSince.Equal(is.since)).To(BeTrue(), "%+v: %s", is, view.MarkedAtWorkSince)
		again, err := slimNode(slim.(*corev1.Node).DeepCopy())
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(again).To(Equal(slim))
	}
}

// TestSlimNodesTellWhoLimitsMemory: another program's sign stays, without what it says beside.
func TestSlimNodesTellWhoLimitsMemory(t *testing.T) {
	for owner, sign := range map[string]func(n *corev1.Node){
		"": func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: "gpu-fractioning.nvidia.com/Ready", Status: corev1.ConditionFalse}}
		},
		"gpu-fractioning": func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: "Ready", Status: corev1.ConditionTrue}, {Type: "gpu-fractioning.nvidia.com/Ready", Status: corev1.ConditionTrue}}
		},
		"HAMi": func(n *corev1.Node) { n.Annotations = map[string]string{"hami.io/node-nvidia-register": "[…]"} },
	} {
		g := NewWithT(t)
		node := &corev1.Node{}
		sign(node)
		slim, err := slimNode(node.DeepCopy())
		g.Expect(err).NotTo(HaveOccurred())
		view, _ := nodeView(slim.(*corev1.Node))
		full, _ := nodeView(node)
		g.Expect(view).To(Equal(full))
		g.Expect(view.MemoryOwner).To(Equal(owner))
		g.Expect(slim.(*corev1.Node).Annotations).NotTo(ContainElement("[…]"))
	}
}

// TestStandAloneCache: with the rights that the manifests give for it, the cache holds the ConfigMap of a stand-alone
// device plugin, and none of anybody else's but those of our name.
func TestStandAloneCache(t *testing.T) {
	t.Parallel()
	g, cluster := NewWithT(t), env.Start(t)
	const theirs = "nvidia-device-plugin"
	for _, namespace := range []string{theirs, "gpu-sharing-operator", "elsewhere"} {
		g.Expect(cluster.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	}
	for _, key := range []types.NamespacedName{
		{Namespace: theirs, Name: "nvidia-plugin-configs"},
		{Namespace: "elsewhere", Name: "another"},
		{Namespace: "elsewhere", Name: pluginconfig.ConfigMapName},
	} {
		g.Expect(cluster.Client.Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name},
		})).To(Succeed())
	}
	g.Expect(cluster.Apply(t.Context(), "config/rbac/role.yaml", "config/manager/rbac.yaml", "config/stand-alone/rbac.yaml")).To(Succeed())
	config, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-controller"})
	g.Expect(err).NotTo(HaveOccurred())

	standAlone := pluginconfig.StandAlone{Namespace: theirs, ConfigMap: "nvidia-plugin-configs"}
	options := CacheOptions(standAlone)
	options.Scheme = cluster.Scheme
	cached, err := cache.New(config, options)
	g.Expect(err).NotTo(HaveOccurred())
	go func() { _ = cached.Start(t.Context()) }()
	_, err = cached.GetInformer(t.Context(), &corev1.ConfigMap{})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(cached.WaitForCacheSync(t.Context())).To(BeTrue())
	found := &corev1.ConfigMapList{}
	g.Expect(cached.List(t.Context(), found)).To(Succeed())
	var keys []string
	for i := range found.Items {
		keys = append(keys, client.ObjectKeyFromObject(&found.Items[i]).String())
	}
	g.Expect(keys).To(ConsistOf(
		"elsewhere/gpu-sharing-device-plugin", "nvidia-device-plugin/nvidia-plugin-configs",
	))
}
