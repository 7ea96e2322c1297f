// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// healthy is an installation without a fault, on so many nodes.
func healthy(t *testing.T, nodes int) installation {
	t.Helper()
	is := installation{
		program: "v0.2.0 (commit 0123)", leader: leadership{proof: "lease gpu-sharing-operator/gpu-sharing-controller is renewed"},
		clusterPolicy: "cluster-policy", gpuOperator: "v26.7.0",
		controllers: []component{{name: "gpu-sharing-operator/gpu-sharing-controller", version: "0.2.0", ready: true}},
	}
	for i := range nodes {
		is.nodes = append(is.nodes, nodeParts{
			name: fmt.Sprintf("node-%d", i), kubelet: "v1.37.1", driver: "580.95.05", nfd: true,
			agents: []component{{name: "a", version: "0.2.0", ready: true}}, plugins: []component{{name: "p", version: "v0.19.3", ready: true}},
		})
	}
	p := policy(t, "cheap", slicing)
	p.Status.ObservedGeneration = 1
	p.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady}}
	is.snapshot.Policies = []v1alpha1.GPUSharingPolicy{p}
	return is
}

// drivenIn is a fault of an installation in which NVIDIA's DRA driver serves node-1.
func drivenIn(fault func(*installation)) func(*installation) {
	return func(is *installation) {
		n := &is.nodes[1]
		n.stack, n.plugins, n.drivers = dra.DRADriver, nil, []component{{name: "d", version: "v0.5.0", ready: true}}
		is.snapshot.DRA = cluster.DRA{ServesClasses: true, ServesTaintRules: true, Classes: []dra.Class{{Name: "gpu.nvidia.com", Resource: "nvidia.com/gpu"}}}
		fault(is)
	}
}

// aloneIn is an installation without the GPU Operator, whose device plugins read one ConfigMap, and whose controller
// was told another.
func aloneIn(read, told string) func(*installation) {
	return func(is *installation) {
		is.clusterPolicy, is.gpuOperator, is.standAlone = "", "", true
		is.told.Namespace, is.told.Name, _ = strings.Cut(told, "/")
		for i := range is.nodes {
			config := &is.nodes[i].plugins[0].config
			config.Namespace, config.Name, _ = strings.Cut(read, "/")
		}
	}
}

// TestTheConfigMapOfADevicePluginIsThatOfItsConfigManager: the pod also mounts what is none.
func TestTheConfigMapOfADevicePluginIsThatOfItsConfigManager(t *testing.T) {
	g := NewWithT(t)
	pod := agentOn("p", "a")
	pod.Labels = map[string]string{nameLabel: "nvidia-device-plugin"}
	pod.Spec.Volumes = []corev1.Volume{
		{Name: "config", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "certificates", VolumeSource: configMapVolume("certificates")},
		{Name: "available-configs", VolumeSource: configMapVolume("configs")},
	}
	mounts := []corev1.VolumeMount{{Name: "config", MountPath: "/config"}, {Name: "certificates", MountPath: "/etc"}, {Name: "available-configs", MountPath: "/available"}}
	pod.Spec.Containers = []corev1.Container{{Name: "plugin", VolumeMounts: mounts}}
	read := func() string {
		is, n := installation{standAlone: true}, nodeParts{}
		is.place(pod, &n)
		if len(n.plugins) == 0 {
			return "no plugin"
		}
		return n.plugins[0].config.String()
	}
	g.Expect(read()).To(Equal("no plugin"), "a pod of a tenant, which may not mount the kubelet's folder for plugins")
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{
		Name: "kubelet", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/device-plugins"}},
	})
	g.Expect(read()).To(Equal("p/"), "a plugin alone follows no label of its node")
	pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
		Name: "sidecar", VolumeMounts: mounts, Env: []corev1.EnvVar{{Name: "CONFIG_FILE_SRCDIR", Value: "/available"}},
	})
	g.Expect(read()).To(Equal("p/configs"))
}

func configMapVolume(name string) corev1.VolumeSource {
	return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}}
}

// TestDoctor: each fault is one finding, which says what to do.
func TestDoctor(t *testing.T) {
	for name, test := range map[string]struct {
		fault func(*installation)
		level string
		says  string
	}{
		"nothing":                    {func(*installation) {}, "", ""},
		"the operator is missing":    {func(is *installation) { is.missing = "no kind" }, levelError, "not installed: no kind. Install it"},
		"no controller runs":         {func(is *installation) { is.leader = leadership{absent: "No controller runs: nobody holds the lease"} }, levelError, "No controller runs: nobody holds the lease"},
		"not known whether one runs": {func(is *installation) { is.leader = leadership{} }, levelWarning, "Not known whether a controller runs"},
		"two installations": {func(is *installation) {
			is.controllers = append(is.controllers, component{name: "b/c", version: "0.2.0", ready: true})
		}, levelError, "installed 2 times: gpu-sharing-operator/gpu-sharing-controller, b/c"},
		"no pod of the controller is available": {func(is *installation) { is.controllers[0].ready = false }, levelError, "No pod of deployment gpu-sharing-operator/gpu-sharing-controller is available"},
		"an old program":                        {func(is *installation) { is.program = "v0.1.0 (commit 0)" }, levelWarning, "This program is v0.1.0 and the controller 0.2.0"},
		"a program without version":             {func(is *installation) { is.program = "(devel) (commit unknown)" }, "", ""},
		"an old CRD": {func(is *installation) {
			is.skews = []skew{{"GPUNode", []string{"spec.a", "status.b"}}}
		}, levelError, "The CRD of GPUNode is older than this program: it lacks spec.a, status.b. Apply the CRDs"},
		"no node, as in a pool at zero": {func(is *installation) { is.nodes = nil }, levelWarning, "nvidia.com/gpu.present=true"},
		"no GPUNode":                    {func(is *installation) { is.nodes, is.unknown = nil, []string{"a"} }, levelError, "1 node (a): the labels of a node with GPUs"},
		"no GPUNode of one node":        {func(is *installation) { is.unknown = []string{"a"} }, levelError, "1 node (a): the labels of a node with GPUs"},
		"no agent":                      {func(is *installation) { is.nodes[1].agents = nil }, levelError, "1 node (node-1): no agent. "},
		"an agent that is not ready":    {func(is *installation) { is.nodes[1].agents[0].ready = false }, levelError, "1 node (node-1): an agent that is not ready"},
		"a node that is down": {func(is *installation) {
			is.nodes[1].down, is.nodes[1].agents, is.nodes[1].plugins[0].ready = true, nil, false
		}, levelWarning, "1 node (node-1): not Ready"},
		"an update of the controller that does not end": {
			func(is *installation) { is.controllers[0].updating = true }, levelError,
			"The update of deployment gpu-sharing-operator/gpu-sharing-controller to version 0.2.0 is not done",
		},
		"an update of the agents": {
			func(is *installation) { is.agentSets = []agentSet{{"x/agents", 3, 3, 1, true, false, ""}} }, levelError,
			"The update of daemonset x/agents is not done: 2 agents of 3 nodes to be replaced",
		},
		"an update of the agents that Kubernetes has not seen": {
			func(is *installation) { is.agentSets = []agentSet{{"x/agents", 3, 3, 3, false, false, ""}} }, levelError, "The update of daemonset x/agents is not done",
		},
		"an update of the agents that is done but on a node that is down": {
			func(is *installation) {
				is.agentSets, is.nodes[0].down, is.nodes[0].agents[0].outdated = []agentSet{{"x/agents", 3, 3, 2, true, false, ""}}, true, true
			}, levelWarning, "1 node (node-0): not Ready",
		},
		"no agent beside the DRA driver of a GPUCluster": {
			func(is *installation) { is.nodes[1].agents, is.nodes[1].draAgent = nil, true }, levelError,
			"1 node (node-1): no agent. With a GPUCluster it runs where the label nvidia.com/gpu.deploy.dra-driver is true",
		},
		"an old agent": {func(is *installation) { is.nodes[1].agents[0].version = "0.1.0" }, levelWarning, "1 node (node-1): an agent of another version than the controller, 0.2.0"},
		"no device plugin is configured": {func(is *installation) {
			is.snapshot.Plugin.Reason, is.snapshot.Plugin.Message = "NoDevicePlugin", "install it"
		}, levelError, "NoDevicePlugin: install it"},
		"a stand-alone device plugin":                  {aloneIn("p/configs", "p/configs"), "", ""},
		"a stand-alone device plugin that is not told": {aloneIn("p/configs", ""), levelError, "Upgrade the operator with --set devicePlugin.namespace=p,devicePlugin.configMap=configs"},
		"another stand-alone device plugin than told":  {aloneIn("p/configs", "p/other"), levelError, "reads ConfigMap p/configs, and the controller was told p/other"},
		"a stand-alone device plugin without a config": {aloneIn("p/", ""), levelError, "in namespace p is not the GPU Operator's and reads no ConfigMap"},
		"an old GPU Operator":                          {func(is *installation) { is.gpuOperator = "v24.9.2" }, levelWarning, "GPU Operator is v24.9.2. Before v25.3"},
		"no Node Feature Discovery":                    {func(is *installation) { is.nodes[0].nfd = false }, levelWarning, "1 node (node-0): no label of Node Feature Discovery"},
		"an old Node Feature Discovery": {
			func(is *installation) { is.nodes[1].discovery = []component{{version: "v0.16.3-minimal"}} }, levelWarning,
			"1 node (node-1): Node Feature Discovery older than v0.17",
		},
		"no device plugin":     {func(is *installation) { is.nodes[2].plugins[0].ready = false }, levelError, "1 node (node-2): no pod of NVIDIA's device plugin that is ready"},
		"an old device plugin": {func(is *installation) { is.nodes[2].plugins[0].version = "v0.17.4" }, levelWarning, "device plugin is v0.17.4. Versions v0.19.3 to v0.20.0"},
		"a new device plugin":  {func(is *installation) { is.nodes[2].plugins[0].version = "v0.21.0-ubi9" }, levelWarning, "device plugin is v0.21.0-ubi9"},
		"a device plugin by digest": {
			func(is *installation) { is.nodes[2].plugins[0].version = "" }, levelWarning,
			"The version of NVIDIA's device plugin is not known: its image has no tag. Versions v0.19.3 to v0.20.0",
		},
		"an old Kubernetes":          {func(is *installation) { is.nodes[0].kubelet = "v1.29.8+rke2r1" }, levelError, "1 node (node-0): kubelet older than 1.30"},
		"an old driver":              {func(is *installation) { is.nodes[0].driver = "525.147.05" }, levelWarning, "1 node (node-0): driver older than 535"},
		"a driver that is not known": {func(is *installation) { is.nodes[0].driver = "" }, "", ""},
		"a policy that is not ready": {func(is *installation) {
			is.snapshot.Policies[0].Status.Conditions[0].Status, is.snapshot.Policies[0].Status.Conditions[0].Reason = metav1.ConditionFalse, v1alpha1.ReasonMIGActive
			is.snapshot.Policies[0].Status.Conditions[0].Message = "GPU 0 is in MIG mode"
		}, levelWarning, "Policy cheap is not ready: MIGActive: GPU 0 is in MIG mode. Let a MIG policy select the GPU, or disable its MIG mode"},
		"NVIDIA's DRA driver serves a node": {drivenIn(func(*installation) {}), "", ""},
		"NVIDIA's DRA driver serves all nodes": {drivenIn(func(is *installation) {
			is.nodes, is.clusterPolicy = is.nodes[1:2], ""
		}), "", ""},
		"both stacks on a node":        {drivenIn(func(is *installation) { is.nodes[0].stack = dra.Both }), levelError, "1 node (node-0): NVIDIA's device plugin and its DRA driver offer the same GPUs"},
		"NVIDIA's DRA driver is away":  {drivenIn(func(is *installation) { is.nodes[1].drivers = nil }), levelError, "1 node (node-1): no pod of NVIDIA's DRA driver that is ready"},
		"another DRA driver":           {drivenIn(func(is *installation) { is.nodes[1].drivers[0].version = "v0.6.0" }), levelWarning, "NVIDIA's DRA driver is v0.6.0. Version v0.5.0 was tested"},
		"a Kubernetes too old for DRA": {drivenIn(func(is *installation) { is.nodes[1].kubelet = "v1.35.4" }), levelError, "1 node (node-1): kubelet older than 1.36, where NVIDIA's DRA driver"},
		"no taints of devices":         {drivenIn(func(is *installation) { is.snapshot.DRA.ServesTaintRules = false }), levelWarning, "serves no DeviceTaintRules"},
		"no classes of v1":             {drivenIn(func(is *installation) { is.snapshot.DRA.ServesClasses = false }), levelError, "serves no DeviceClasses of resource.k8s.io/v1"},
		"a right that the user lacks":  {drivenIn(func(is *installation) { is.lacks = []string{"You may not list ResourceClaims"} }), levelWarning, "You may not list ResourceClaims"},
		"two classes for one resource": {drivenIn(func(is *installation) {
			is.snapshot.DRA.Classes = append(is.snapshot.DRA.Classes, dra.Class{Name: "mine", Resource: "nvidia.com/gpu", Age: 1 << 40}, dra.Class{Name: "x"}, dra.Class{Name: "y"})
		}), levelWarning, "DeviceClasses gpu.nvidia.com, mine all serve nvidia.com/gpu; when one is deleted"},
		"many nodes": {func(is *installation) {
			*is = healthy(t, 9)
			for i := range is.nodes {
				is.nodes[i].nfd = false
			}
		}, levelWarning, "9 nodes (node-0, node-1, node-2, node-3, node-4 and 4 more): no label"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			is := healthy(t, 3)
			test.fault(&is)
			var wrong []finding
			for _, f := range diagnose(is) {
				if f.level != levelOK {
					wrong = append(wrong, f)
				}
			}
			if test.level == "" {
				g.Expect(wrong).To(BeEmpty())
				return
			}
			g.Expect(wrong).To(HaveLen(1))
			g.Expect(wrong[0].level).To(Equal(test.level))
			g.Expect(wrong[0].what).To(ContainSubstring(test.says))
		})
	}
	is := healthy(t, 3)
	is.program, is.nodes[1].agents = "v0.1.0 (commit 0)", nil
	compare(t, "doctor", func(shown *text) { shown.findings(diagnose(is)) })
}

// TestANodeThatIsDownHidesNoMissingAgent: the pod of a DaemonSet stays on a node that is down, and Kubernetes counts it
// as scheduled, and as updated if it is. So such a node has its agent, and is neither the one that lacks it nor the one
// whose agent is to be replaced.
func TestANodeThatIsDownHidesNoMissingAgent(t *testing.T) {
	scheme, err := newScheme()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	for title, tc := range map[string]struct {
		present, updated int32
		agents           []string // the generation of the agent of each node, of which the first is down; empty: none
		says             string
	}{
		"another has none":             {1, 1, []string{"2", ""}, "has no pod on 1 of 2 nodes"},
		"another has an old one":       {2, 1, []string{"2", "1"}, "1 agent of 2 nodes to be replaced"},
		"it and another have old ones": {2, 0, []string{"1", "1"}, "1 agent of 2 nodes to be replaced"},
		"it has none":                  {1, 1, []string{"", "2"}, ""},
		"it has an old one":            {2, 1, []string{"1", "2"}, ""},
		"all are as they should be":    {2, 2, []string{"2", "2"}, ""},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			is := healthy(t, 2)
			is.nodes[0].down = true
			set := &appsv1.DaemonSet{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "gpu-sharing-operator", Name: "gpu-sharing-agent", Labels: map[string]string{nameLabel: agentName},
					Annotations: map[string]string{appsv1.DeprecatedTemplateGeneration: "2"},
				},
				Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 2, CurrentNumberScheduled: tc.present, UpdatedNumberScheduled: tc.updated},
			}
			g.Expect(is.readAgentSets(t.Context(), fake.NewClientBuilder().WithScheme(scheme).WithObjects(set).Build())).To(Succeed())
			for i, generation := range tc.agents {
				is.nodes[i].agents = nil
				if generation == "" {
					continue
				}
				pod := agentOn("gpu-sharing-operator", is.nodes[i].name)
				pod.Labels[podGeneration] = generation
				pod.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Name: "gpu-sharing-agent", Controller: new(true)}}
				is.place(pod, &is.nodes[i])
			}
			var told []string
			for _, f := range diagnose(is) {
				if strings.Contains(f.what, "daemonset gpu-sharing-operator/gpu-sharing-agent") {
					told = append(told, f.what)
				}
			}
			if tc.says == "" {
				g.Expect(told).To(BeEmpty())
				return
			}
			g.Expect(told).To(HaveExactElements(ContainSubstring(tc.says)))
		})
	}
}

// TestOneAgentIsExpectedOnANode: of the DaemonSet that NVIDIA's labels choose. A node that is down keeps only that one
// from being updated.
func TestOneAgentIsExpectedOnANode(t *testing.T) {
	g := NewWithT(t)
	is := healthy(t, 4)
	for i, label := range []string{"", "true", "paused-for-driver-upgrade", "false"} {
		is.nodes[i].observe(&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"nvidia.com/gpu.deploy.dra-driver": label}},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}},
		})
		g.Expect(is.nodes[i].draAgent).To(Equal(label != ""), label)
	}
	is.nodes[2].down = false
	for i := range is.nodes {
		is.nodes[i].agents[0].outdated = true
	}
	g.Expect(is.outdated(agentSet{nodes: 5, present: 5, updated: 1})).To(Equal(3))
	g.Expect(is.outdated(agentSet{nodes: 5, present: 5, updated: 1, dra: true})).To(Equal(2))
}

// TestCompatibilityIsThatOfTheDocs: the versions that doctor compares with stand in its table.
func TestCompatibilityIsThatOfTheDocs(t *testing.T) {
	g := NewWithT(t)
	page, err := os.ReadFile("../../docs/install.md")
	g.Expect(err).NotTo(HaveOccurred())
	rows := map[string]string{}
	for line := range strings.Lines(string(page)) {
		if cells := strings.Split(line, "|"); len(cells) == 5 {
			rows[strings.TrimSpace(cells[1])] = line
		}
	}
	for row, versions := range map[string][]string{
		"Kubernetes": {"| " + leastKubernetes + " and later"}, "NVIDIA's DRA driver": {"| " + testedDRA + " on Kubernetes 1.37.1", "Kubernetes " + leastForDRA + " and later"}, "NVIDIA's GPU Operator": {"| " + leastGPUOperator + " and later; earlier ones without MPS"},
		"Device plugin, GPU Feature Discovery, config-manager": {"| " + firstPlugin + " |", "| " + lastPlugin + " |"}, "Driver": {"| " + leastDriver + " and later"},
		"Node Feature Discovery": {"| " + leastNFD + " and later"},
	} {
		for _, version := range versions {
			g.Expect(rows[row]).To(ContainSubstring(version), row)
		}
	}
}

func TestVersionsOfImages(t *testing.T) {
	for image, want := range map[string]string{
		"registry.example.com:5000/gpu/agent:0.2.0": "0.2.0", "agent": "", "registry.example.com:5000/agent": "",
		"nvcr.io/nvidia/k8s-device-plugin:v0.19.3-ubi9@sha256:ab12": "v0.19.3-ubi9", "agent@sha256:ab12": "",
	} {
		NewWithT(t).Expect(versionOf(nil, &corev1.PodSpec{Containers: []corev1.Container{{Image: image}}})).To(Equal(want), image)
	}
	NewWithT(t).Expect(versionOf(map[string]string{"app.kubernetes.io/version": "0.3.0"}, &corev1.PodSpec{})).To(Equal("0.3.0"))
}

// TestTheVersionOfAnAgentByDigestIsThatOfItsLabel: as charts and bundles of a release install it.
func TestTheVersionOfAnAgentByDigestIsThatOfItsLabel(t *testing.T) {
	agent := agentOn("x", "a")
	agent.Labels["app.kubernetes.io/version"] = "0.1.0"
	agent.Spec.Containers = []corev1.Container{{Image: "registry.example.com/agent@sha256:ab12"}}
	is, on := installation{}, nodeParts{}
	is.place(agent, &on)
	NewWithT(t).Expect(on.agents).To(HaveExactElements(component{name: "x/agent-a", version: "0.1.0"}))
}

// TestNodesThatTheControllerSelectsHaveAGPUNode: which nodes have GPUs the controller is told.
func TestNodesThatTheControllerSelectsHaveAGPUNode(t *testing.T) {
	g := NewWithT(t)
	scheme, err := newScheme()
	g.Expect(err).NotTo(HaveOccurred())
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "c", Labels: map[string]string{nameLabel: controllerName}}}
	deployment.Spec.Template.Spec.Containers = []corev1.Container{{Args: []string{"--leader-elect", "--node-selector=pool=gpu"}}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(deployment,
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{"pool": "gpu"}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b", Labels: map[string]string{"nvidia.com/gpu.present": "true"}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c", Labels: map[string]string{"pool": "gpu"}}}).Build()
	is := installation{snapshot: snapshotOf(newNode(t, "c"))}
	g.Expect(is.readControllers(t.Context(), c)).To(Succeed())
	g.Expect(is.readNodes(t.Context(), c)).To(Succeed())
	g.Expect(is.unknown).To(Equal([]string{"a"}))
}

// TestAnUpdateOfTheControllerIsNotDoneBeforeItsPodsAreNew: the version of a Deployment is not yet that of its pods.
func TestAnUpdateOfTheControllerIsNotDoneBeforeItsPodsAreNew(t *testing.T) {
	for title, tc := range map[string]struct {
		status   appsv1.DeploymentStatus
		updating bool
	}{
		"done":                       {appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 2, UpdatedReplicas: 2, AvailableReplicas: 2}, false},
		"one pod finds no place":     {appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 2, UpdatedReplicas: 2, AvailableReplicas: 1}, false},
		"not begun":                  {appsv1.DeploymentStatus{ObservedGeneration: 1, Replicas: 2, UpdatedReplicas: 2, AvailableReplicas: 2}, true},
		"the new pod does not start": {appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 3, UpdatedReplicas: 1, AvailableReplicas: 2}, true},
		"an old pod is left":         {appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 3, UpdatedReplicas: 2, AvailableReplicas: 3}, true},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Spec: appsv1.DeploymentSpec{Replicas: new(int32(2))}, Status: tc.status}
			g.Expect(isUpdating(d)).To(Equal(tc.updating))
		})
	}
}

// TestAPodOfATenantIsNoAgent: who may create a pod may give it the label of the agents.
func TestAPodOfATenantIsNoAgent(t *testing.T) {
	for namespace, agents := range map[string]int{"x": 1, "tenant": 0} {
		g := NewWithT(t)
		scheme, err := newScheme()
		g.Expect(err).NotTo(HaveOccurred())
		deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "c", Labels: map[string]string{nameLabel: controllerName}}}
		pod := agentOn(namespace, "a")
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(deployment, pod, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}).Build()
		is := installation{snapshot: snapshotOf(newNode(t, "a"))}
		g.Expect(is.readControllers(t.Context(), c)).To(Succeed())
		g.Expect(is.readNodes(t.Context(), c)).To(Succeed())
		g.Expect(is.nodes[0].agents).To(HaveLen(agents), namespace)
	}
}

// TestAgentsThatCannotBeCreatedAreNoUpdate: where the cluster enforces Pod Security or a quota, the DaemonSet of the
// agents wants a pod on each node and gets none. There is nothing to replace and no pod to look at.
func TestAgentsThatCannotBeCreatedAreNoUpdate(t *testing.T) {
	g := NewWithT(t)
	is := healthy(t, 3)
	is.agentSets = []agentSet{{name: "gpu-sharing-operator/gpu-sharing-agent", nodes: 3, observed: true}}
	for i := range is.nodes {
		is.nodes[i].agents = nil
	}
	found := diagnose(is)
	for _, f := range found {
		g.Expect(f.what).NotTo(ContainSubstring("to be replaced"))
	}
	g.Expect(found).To(ContainElement(finding{levelError, "daemonset gpu-sharing-operator/gpu-sharing-agent has no pod on 3 of 3 nodes. Its Events say why pods " +
		"cannot be created, such as Pod Security or a quota: kubectl -n gpu-sharing-operator describe daemonset gpu-sharing-agent"}))
	_, updating := is.updated()
	g.Expect(updating).To(BeTrue(), "helm test looks again: they may come")
	is.nodes[0].down, is.agentSets[0].present, is.agentSets[0].updated = true, 2, 2
	for _, f := range diagnose(is) {
		g.Expect(f.what).NotTo(ContainSubstring("has no pod"), "a node that is down runs none")
	}
}

// OLM v1 refuses what it does not own, so its administrator is told what to give it.
func TestDoctorTellsHowToGoOnFromOLMv0ToV1(t *testing.T) {
	g := NewWithT(t)
	is := healthy(t, 2)
	is.olmV0 = "gpus"
	shown := func() string {
		text, err := reportAs(diagnose(is), 60, "")
		g.Expect(err).NotTo(HaveOccurred())
		return text
	}
	g.Expect(shown()).NotTo(ContainSubstring("OLM v0"), "the operator runs")

	is.leader, is.controllers = leadership{absent: "No controller is installed"}, nil
	g.Expect(shown()).To(ContainSubstring("OLM v0 has uninstalled the operator"))
	g.Expect(shown()).To(ContainSubstring("\n    kubectl label crd gpunodes.gpusharing.io gpusharingpolicies.gpusharing.io app.kubernetes.io/managed-by=Helm olm.managed- "+
		"operators.coreos.com/gpu-sharing-operator.gpus-\n"), "commands are whole on a narrow terminal")
	g.Expect(shown()).To(ContainSubstring(" meta.helm.sh/release-namespace=gpus\n"))
}

// OLM v0 overwrites what OLM v1 has installed, without a word; and OLM v1 takes what a release of Helm with its name has.
func TestDoctorTellsWhoInstallsBesideOthers(t *testing.T) {
	g := NewWithT(t)
	of := func(apiVersion, kind, name string, more map[string]any) *unstructured.Unstructured {
		o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": apiVersion, "kind": kind, "metadata": map[string]any{"name": name, "namespace": "gpus"}}}
		maps.Copy(o.Object, more)
		return o
	}
	csv := of("operators.coreos.com/v1alpha1", "ClusterServiceVersion", "gpu-sharing-operator.v0.1.0", nil)
	copied := of("operators.coreos.com/v1alpha1", "ClusterServiceVersion", "gpu-sharing-operator.v0.1.0", nil)
	copied.SetNamespace("default")
	copied.SetLabels(map[string]string{"olm.copiedFrom": "gpus"})
	package1 := map[string]any{"spec": map[string]any{"source": map[string]any{"catalog": map[string]any{"packageName": "gpu-sharing-operator"}}}}
	extension := of("olm.operatorframework.io/v1", "ClusterExtension", "ours", package1)
	other := of("olm.operatorframework.io/v1", "ClusterExtension", "theirs", map[string]any{"spec": map[string]any{}})
	installers := func(objects ...client.Object) []string {
		mapper := meta.NewDefaultRESTMapper(nil)
		mapper.Add(csv.GroupVersionKind(), meta.RESTScopeNamespace)
		mapper.Add(extension.GroupVersionKind(), meta.RESTScopeRoot)
		mapper.Add(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"}, meta.RESTScopeRoot)
		extension.SetNamespace("")
		other.SetNamespace("")
		all, err := installersOf(t.Context(), fake.NewClientBuilder().WithRESTMapper(mapper).WithObjects(objects...).Build())
		g.Expect(err).NotTo(HaveOccurred())
		return all
	}
	is := healthy(t, 1)
	is.installers = installers(copied, extension, other)
	g.Expect(is.installers).To(Equal([]string{"OLM v1 (ClusterExtension ours)"}))
	g.Expect(fmt.Sprint(diagnose(is))).NotTo(ContainSubstring("Several programs"))
	is.installers = installers(csv, extension, other)
	g.Expect(fmt.Sprint(diagnose(is))).To(ContainSubstring("OLM v0 (ClusterServiceVersion gpus/gpu-sharing-operator.v0.1.0), OLM v1 (ClusterExtension ours). Remove all but one"))
}

// TestFieldsThatACRDLacks: none lacks a field as it is in this repository; each that is missing is found.
func TestFieldsThatACRDLacks(t *testing.T) {
	g := NewWithT(t)
	published := func(drop ...string) map[string]openAPISchema {
		schemas := map[string]openAPISchema{}
		for kind, file := range map[string]string{"GPUNode": "gpunodes", "GPUSharingPolicy": "gpusharingpolicies"} {
			data, err := os.ReadFile("../../config/crd/gpusharing.io_" + file + ".yaml")
			g.Expect(err).NotTo(HaveOccurred())
			var definition struct {
				Spec struct {
					Versions []struct {
						Schema struct {
							Root map[string]any `json:"openAPIV3Schema"`
						} `json:"schema"`
					} `json:"versions"`
				} `json:"spec"`
			}
			g.Expect(yaml.Unmarshal(data, &definition)).To(Succeed())
			root := definition.Spec.Versions[0].Schema.Root
			if kind == "GPUNode" && len(drop) > 0 {
				without(root, drop)
			}
			root["x-kubernetes-group-version-kind"] = []any{map[string]any{"group": "gpusharing.io", "kind": kind, "version": "v1alpha1"}}
			data, err = json.Marshal(root)
			g.Expect(err).NotTo(HaveOccurred())
			var s openAPISchema
			g.Expect(json.Unmarshal(data, &s)).To(Succeed())
			schemas[kind] = s
		}
		return schemas
	}
	g.Expect(skews(published())).To(BeEmpty())
	g.Expect(skews(published("status", "observedGeneration"))).To(ConsistOf(skew{"GPUNode", []string{"status.observedGeneration"}}))
	g.Expect(skews(published("spec"))).To(ConsistOf(skew{"GPUNode", []string{"spec"}}))
	g.Expect(skews(published("status", "devices", "[]", "uuid"))).To(ConsistOf(skew{"GPUNode", []string{"status.devices[].uuid"}}))
}

// without removes a property from a schema.
func without(s map[string]any, path []string) {
	if path[0] == "[]" {
		items, _ := s["items"].(map[string]any)
		without(items, path[1:])
		return
	}
	properties, _ := s["properties"].(map[string]any)
	if len(path) == 1 {
		delete(properties, path[0])
		return
	}
	part, _ := properties[path[0]].(map[string]any)
	without(part, path[1:])
}
