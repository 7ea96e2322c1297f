// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestOnAnAPIServer runs the commands against a real API server, on whose side validation, defaults and dry run are.
func TestOnAnAPIServer(t *testing.T) {
	cluster := env.Start(t, env.WithNVIDIA())
	n := newNode(t, "a", sim.A100, sim.T4)
	hold(&n, "train", 0, nil)
	populate(t, cluster.Client, n)
	kubeconfig := env.KubeconfigFile(t, cluster.Config)
	run := func(policy string, args ...string) (string, error) {
		var out strings.Builder
		p := &Program{In: strings.NewReader(policy), Out: &out, Clock: clocktesting.NewFakeClock(now), Width: 100}
		err := p.Run(t.Context(), append(args, "--kubeconfig", kubeconfig))
		return out.String(), failure(err)
	}
	t.Run("plan of a new policy creates nothing", func(t *testing.T) {
		g := NewWithT(t)
		out, err := run(research, "plan", "-f", "-")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(And(
			ContainSubstring("POLICY research (new): selects 1 node\n"),
			ContainSubstring("\nNODE a\n  advertised   nvidia.com/gpu: 2\n  afterwards   nvidia.com/gpu: 1, nvidia.com/mig-2g.10gb: 3\n"),
			ContainSubstring("  steps        GPU 0 (NVIDIA-A100-SXM4-40GB): enable MIG mode\n"),
			ContainSubstring("  blocked by   pod team/train uses GPU 0: is waited for, up to 10m0s (rollout.drain)\n"),
		))
		all := &v1alpha1.GPUSharingPolicyList{}
		g.Expect(cluster.Client.List(t.Context(), all)).To(Succeed())
		g.Expect(all.Items).To(BeEmpty())
	})
	t.Run("plan tells what the API server refuses", func(t *testing.T) {
		for name, test := range map[string]struct{ policy, says string }{
			"a value":           {strings.Replace(research, "count: 3", "count: 9", 1), "should be less than or equal to 7"},
			"a misspelled name": {strings.Replace(research, "gpuSelector", "gpuSelektor", 1), `unknown field "spec.gpuSelektor"`},
			"a missing spec":    {"{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: x}}", "spec: Required value"},
		} {
			t.Run(name, func(t *testing.T) {
				_, err := run(test.policy, "plan", "-f", "-")
				NewWithT(t).Expect(err).To(MatchError(And(HavePrefix("policy "), ContainSubstring(test.says))))
			})
		}
	})
	t.Run("plan of a change replaces the spec and changes nothing", func(t *testing.T) {
		g := NewWithT(t)
		present := policy(t, "research", slicing)
		present.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "none"}}
		present.ResourceVersion = ""
		g.Expect(cluster.Client.Create(t.Context(), &present)).To(Succeed())
		out, err := run(research, "plan", "-f", "-")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(ContainSubstring("POLICY research (changed): selects 1 node\n"))
		g.Expect(out).To(ContainSubstring("nvidia.com/mig-2g.10gb: 3"))
		_, err = run(strings.Replace(research, "gpuSelector", "gpuSelektor", 1), "plan", "-f", "-")
		g.Expect(err).To(MatchError(ContainSubstring(`unknown field "spec.gpuSelektor"`)))
		after := &v1alpha1.GPUSharingPolicy{}
		g.Expect(cluster.Client.Get(t.Context(), client.ObjectKeyFromObject(&present), after)).To(Succeed())
		g.Expect(after.Spec).To(Equal(present.Spec))
	})
	t.Run("plan of a deletion deletes nothing", func(t *testing.T) {
		g := NewWithT(t)
		out, err := run("", "plan", "--delete", "research")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(HavePrefix("POLICY research (deleted): releases "))
		g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: "research"}, &v1alpha1.GPUSharingPolicy{})).To(Succeed())
		_, err = run("", "plan", "--delete", "reserch")
		g.Expect(err).To(MatchError(ContainSubstring(`there is no policy "reserch" to delete`)))
	})
	t.Run("doctor reads the cluster and names what is missing", func(t *testing.T) {
		g := NewWithT(t)
		out, err := run("", "doctor")
		g.Expect(err).To(MatchError(ErrUnhealthy))
		g.Expect(strings.Join(strings.Fields(out), " ")).To(And(ContainSubstring("error No controller is installed: "),
			ContainSubstring("error 1 node (a): no pod of NVIDIA's device plugin that is ready"), ContainSubstring("warning Policy research is not ready")))
		_, err = run("", "doctor", "a")
		g.Expect(err).To(MatchError(ContainSubstring("doctor takes no argument")))
	})
	t.Run("status for programs", func(t *testing.T) {
		g := NewWithT(t)
		out, err := run("", "status", "-o", "json", "--product", "Tesla-T4")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(ContainSubstring(`"name": "a"`))
		_, err = run("", "status", "-o", "table")
		g.Expect(err).To(MatchError(ContainSubstring(`--output "table" of status is not one of json, wide, yaml`)))
	})
	t.Run("import needs to know what the device plugin reads", func(t *testing.T) { importsKnown(t, cluster.Client, run) })
	t.Run("plan tells what the ClusterPolicy lacks for taints", func(t *testing.T) {
		g := NewWithT(t)
		clusterPolicy := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
			"daemonsets": map[string]any{}, "driver": map[string]any{"upgradePolicy": map[string]any{"autoUpgrade": true}},
		}}}
		clusterPolicy.SetGroupVersionKind(schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"})
		clusterPolicy.SetName("cluster-policy")
		clusterPolicy.SetAnnotations(map[string]string{v1alpha1.AnnotationBaseline: `{"config":{"name":"plugin-configs","default":"any"}}`})
		g.Expect(cluster.Client.Create(t.Context(), clusterPolicy)).To(Succeed())
		g.Expect(configBefore(t.Context(), cluster.Client)).To(Equal("ConfigMap plugin-configs"), "on which it depends what nodes return to")
		out, err := run(strings.Replace(research, "spec:", "spec:\n  taints: [{key: team}]", 1), "plan", "-f", "-")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(strings.Join(strings.Fields(out), " ")).To(ContainSubstring("add {key: team, operator: Exists, effect: NoSchedule} to " +
			"daemonsets.tolerations of the ClusterPolicy"))
	})
	t.Run("plan and import tell that clients of NVIDIA's MPS daemons hold policies up", func(t *testing.T) {
		waitsForMPSClients(t, cluster.Client, run)
	})
	t.Run("plan tells that NVIDIA's mig-manager is turned off", func(t *testing.T) {
		g := NewWithT(t)
		byManager := strings.Replace(research, "mig: {", "mig: {actuator: MIGManager, ", 1)
		out, err := run(byManager, "plan", "-f", "-")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(ContainSubstring("NVIDIA's mig-manager: apply gpusharing-"))
		clusterPolicy := &unstructured.Unstructured{}
		clusterPolicy.SetGroupVersionKind(schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"})
		clusterPolicy.SetName("cluster-policy")
		off := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"migManager":{"enabled":false}}}`))
		g.Expect(cluster.Client.Patch(t.Context(), clusterPolicy, off)).To(Succeed())
		out, err = run(byManager, "plan", "-f", "-")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(strings.Join(strings.Fields(out), " ")).To(ContainSubstring("NoMIGManager: the policy asks for NVIDIA's mig-manager " +
			"(sharing.mig.actuator), which does not run here: ClusterPolicy cluster-policy has spec.migManager.enabled false"))
		g.Expect(cluster.Serve(t.Context(), "clusterpolicies.nvidia.com", "v2")).To(Succeed())
		g.Eventually(func() (string, error) { return run(byManager, "plan", "-f", "-") }, "20s", "100ms").Should(Equal(out), "a later GPU Operator serves it")
		g.Expect(cluster.Serve(t.Context(), "clusterpolicies.nvidia.com", "v1")).To(Succeed())
	})
	t.Run("status shows nodes, and knows those that are none", func(t *testing.T) {
		g := NewWithT(t)
		out, err := run("", "status", "a")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(And(ContainSubstring("NODE a   no policy   Ready\n"), ContainSubstring("|team/train")))
		_, err = run("", "status", "b")
		g.Expect(err).To(MatchError("\"b\" is no node with GPUs; `kubectl get gpunodes` lists those that are"))
	})
	t.Run("status reports that no controller runs", func(t *testing.T) {
		g := NewWithT(t)
		out, err := run("", "status")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(strings.Join(strings.Fields(out), " ")).To(HavePrefix("No controller is installed: no ClusterRoleBinding names service account gpu-sharing-controller. If one runs outside"))
		g.Expect(cluster.Client.Create(t.Context(), bindingOf("gpu-sharing-operator"))).To(Succeed())
		t.Cleanup(func() {
			g.Expect(cluster.Client.Delete(context.Background(), bindingOf("gpu-sharing-operator"))).To(Succeed())
		})
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-sharing-operator", Name: controllerName}}
		renewed := func(before time.Duration, holder string) string {
			lease.ResourceVersion = ""
			lease.Spec = coordinationv1.LeaseSpec{
				HolderIdentity: &holder, LeaseDurationSeconds: new(int32(15)), RenewTime: &metav1.MicroTime{Time: now.Add(-before)},
			}
			g.Expect(client.IgnoreNotFound(cluster.Client.Delete(t.Context(), lease))).To(Succeed())
			g.Expect(cluster.Client.Create(t.Context(), lease)).To(Succeed())
			out, err := run("", "status")
			g.Expect(err).NotTo(HaveOccurred())
			return strings.Join(strings.Fields(out), " ")
		}
		g.Expect(renewed(14*time.Second, "one")).NotTo(ContainSubstring("No controller runs"))
		g.Expect(renewed(70*time.Second, "one")).NotTo(ContainSubstring("No controller runs"), "the clocks may differ")
		g.Expect(renewed(-time.Hour, "one")).NotTo(ContainSubstring("No controller runs"), "the clocks may differ")
		g.Expect(renewed(10*time.Minute, "one")).To(ContainSubstring(
			"lease gpu-sharing-operator/gpu-sharing-controller was last renewed at 2027-01-15T07:50:00Z, by one; look at deployment gpu-sharing-operator/gpu-sharing-controller and the log"))
		g.Expect(renewed(time.Second, "")).To(ContainSubstring("nobody holds lease gpu-sharing-operator/gpu-sharing-controller"))
	})
	t.Run("doctor names the fields that an old CRD lacks", func(t *testing.T) {
		g := NewWithT(t)
		definition := object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "gpunodes.gpusharing.io", map[string]any{})
		without := client.RawPatch(types.JSONPatchType, []byte(`[{"op":"remove","path":"/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/driverVersion"}]`))
		out, err := run("", "doctor")
		g.Expect(err).To(MatchError(ErrUnhealthy))
		g.Expect(out).NotTo(ContainSubstring("The CRD of"))
		g.Expect(cluster.Client.Patch(t.Context(), definition, without)).To(Succeed())
		g.Eventually(func() string {
			out, _ := run("", "doctor")
			return strings.Join(strings.Fields(out), " ")
		}).WithTimeout(time.Minute).Should(ContainSubstring("The CRD of GPUNode is older than this program: it lacks status.driverVersion. Apply"))
	})
	t.Run("a cluster without the operator is told as such", func(t *testing.T) {
		g := NewWithT(t)
		for _, name := range []string{"gpusharingpolicies.gpusharing.io", "gpunodes.gpusharing.io"} {
			definition := &unstructured.Unstructured{}
			definition.SetName(name)
			definition.SetGroupVersionKind(schema.GroupVersionKind{
				Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition",
			})
			g.Expect(cluster.Client.Delete(t.Context(), definition)).To(Succeed())
		}
		for _, args := range [][]string{{"status"}, {"plan", "-f", "-"}} {
			g.Eventually(func() error {
				_, err := run(research, args...)
				return err
			}).WithTimeout(30*time.Second).Should(MatchError(ContainSubstring("install the GPU Sharing Operator in this cluster")), args[0])
		}
	})
}

// waitsForMPSClients: a changed ClusterPolicy would restart the daemons under them.
func waitsForMPSClients(t *testing.T, c client.Client, run func(string, ...string) (string, error)) {
	t.Helper()
	g := NewWithT(t)
	printed := func(policy string, args ...string) string {
		t.Helper()
		out, err := run(policy, args...)
		g.Expect(err).NotTo(HaveOccurred())
		return strings.Join(strings.Fields(strings.ReplaceAll(out, "\n#", " ")), " ")
	}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	labels := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"nvidia.com/gpu.present":"true","nvidia.com/device-plugin.config":null}}}`))
	g.Expect(c.Patch(t.Context(), n, labels)).To(Succeed())
	configured := func(config string) {
		t.Helper()
		policy := object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy", map[string]any{})
		g.Expect(c.Patch(t.Context(), policy, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"devicePlugin":{"config":`+config+`}}}`)))).To(Succeed())
		status := client.RawPatch(types.MergePatchType, []byte(`{"status":{"namespace":"default","state":"ready"}}`))
		g.Expect(c.Status().Patch(t.Context(), policy, status)).To(Succeed())
	}
	configMap := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "by-hand"},
		Data:       map[string]string{"any": "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"},
	}
	g.Expect(c.Create(t.Context(), configMap)).To(Succeed())
	configured(`{"name":"by-hand","default":"any"}`)
	const why = "restarts NVIDIA's MPS daemons, which ends their clients: pod team/infer; it is changed once these have ended"
	g.Expect(printed("", "import")).NotTo(ContainSubstring(v1alpha1.ReasonMPSClientsRunning))
	g.Expect(printed(research, "plan", "-f", "-")).NotTo(ContainSubstring(v1alpha1.ReasonMPSClientsRunning))

	daemon := ofDaemonSet(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "daemon"}, Spec: corev1.PodSpec{
		NodeName: "a", NodeSelector: map[string]string{cluster.LabelMPSCapable: "true"}, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/x"}},
	}})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "infer"}, Spec: corev1.PodSpec{
		NodeName: "a", Containers: []corev1.Container{{Name: "main", Image: "example.invalid/x", Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")},
		}}},
	}}
	g.Expect(c.Create(t.Context(), daemon)).To(Succeed())
	g.Expect(c.Create(t.Context(), pod)).To(Succeed())
	g.Expect(printed("", "import")).To(And(ContainSubstring(v1alpha1.ReasonMPSClientsRunning), ContainSubstring(why)))
	g.Expect(printed(research, "plan", "-f", "-")).To(And(ContainSubstring(v1alpha1.ReasonMPSClientsRunning), ContainSubstring(why)))

	configured(`{"name":"gpu-sharing-device-plugin","default":"any"}`)
	g.Expect(printed(research, "plan", "-f", "-")).NotTo(ContainSubstring(v1alpha1.ReasonMPSClientsRunning), "the operator does not change it any more")
	configured("null")
	for _, o := range []client.Object{daemon, pod, configMap} {
		g.Expect(c.Delete(t.Context(), o, client.GracePeriodSeconds(0))).To(Succeed())
	}
}

// importsKnown: labels are only called useless where it is known what the device plugin reads.
func importsKnown(t *testing.T, c client.Client, run func(string, ...string) (string, error)) {
	t.Helper()
	g := NewWithT(t)
	printed := func(args ...string) string {
		t.Helper()
		out, err := run("", append([]string{"import"}, args...)...)
		g.Expect(err).NotTo(HaveOccurred())
		return strings.ReplaceAll(out, "\n# ", " ")
	}
	patch := func(o client.Object, patch string) {
		t.Helper()
		g.Expect(c.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(patch)))).To(Succeed())
	}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	patch(n, `{"metadata":{"labels":{"nvidia.com/device-plugin.config":"slice-4"}}}`)
	offers := client.RawPatch(types.MergePatchType, []byte(`{"status":{"capacity":{"nvidia.com/gpu":"8"},"allocatable":{"nvidia.com/gpu":"8"}}}`))
	g.Expect(c.Status().Patch(t.Context(), n, offers)).To(Succeed()) // as the plugin does
	g.Expect(c.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "plugin"},
		Data:       map[string]string{"slice-4": "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"},
	})).To(Succeed())
	const keep = "Until then keep the labels nvidia.com/device-plugin.config"

	g.Expect(printed()).To(And(ContainSubstring("name it by --configmap NAMESPACE/NAME"), ContainSubstring(keep),
		Not(ContainSubstring("kind: GPUSharingPolicy")), Not(ContainSubstring("No GPU is shared"))))
	g.Expect(printed("--configmap", "default/plugin")).To(ContainSubstring("replicas: 4"))
	for configMap, says := range map[string]string{
		"plugin": `--configmap "plugin" is not NAMESPACE/NAME`, "/plugin": "is not NAMESPACE/NAME", "default/": "is not NAMESPACE/NAME",
		"default/plugins": `reading ConfigMap default/plugins, which the device plugin reads: configmaps "plugins" not found`,
	} {
		_, err := run("", "import", "--configmap", configMap)
		g.Expect(err).To(MatchError(ContainSubstring(says)))
	}
	operator := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"devicePlugin": map[string]any{"enabled": false, "config": map[string]any{"name": "other"}}, "mig": map[string]any{"strategy": "mixed"},
	}}}
	operator.SetGroupVersionKind(schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"})
	operator.SetName("cluster-policy")
	g.Expect(c.Create(t.Context(), operator)).To(Succeed())
	g.Expect(printed()).To(ContainSubstring(keep), "the device plugin is a stand-alone one")
	g.Expect(printed("--configmap", "default/plugin")).To(And(ContainSubstring("replicas: 4"), Not(ContainSubstring("MachineSet"))))
	patch(n, `{"metadata":{"annotations":{"`+cluster.AnnotationMachine+`":"openshift-machine-api/gpu-a"}}}`)
	g.Expect(printed("--configmap", "default/plugin")).To(ContainSubstring("remove the label from the MachineSet"))
	patch(n, `{"metadata":{"annotations":null}}`)
	patch(operator, `{"spec":{"devicePlugin":{"enabled":true}}}`)
	g.Expect(printed()).To(And(ContainSubstring("has no status.namespace yet"), ContainSubstring(keep)))
	status := client.RawPatch(types.MergePatchType, []byte(`{"status":{"namespace":"default","state":"ready"}}`))
	g.Expect(c.Status().Patch(t.Context(), operator, status)).To(Succeed())
	g.Expect(printed()).To(And(ContainSubstring("which does not exist; create it or correct the ClusterPolicy"), ContainSubstring(keep)))
	_, err := run("", "import", "--configmap", "default/plugin")
	g.Expect(err).To(MatchError(ContainSubstring("ClusterPolicy cluster-policy runs one")))
	patch(operator, `{"spec":{"devicePlugin":{"config":null}}}`)
	g.Expect(printed()).To(ContainSubstring("nvidia.com/device-plugin.config=slice-4 has no effect"))
	g.Expect(c.Delete(t.Context(), operator)).To(Succeed())
}

const research = `
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {}
  gpuSelector: {products: ["NVIDIA-A100-*"]}
  sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 2g.10gb, count: 3}]}]}}
`

// populate creates a node with its GPUNode, its agent and the pods on it.
func populate(t *testing.T, c client.Client, n cluster.Node) {
	t.Helper()
	g := NewWithT(t)
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: n.Labels}}
	g.Expect(c.Create(t.Context(), object)).To(Succeed())
	object.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("8")}
	for name, count := range n.Allocatable {
		object.Status.Allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(count, resource.DecimalSI)
	}
	object.Status.Capacity = object.Status.Allocatable
	g.Expect(c.Status().Update(t.Context(), object)).To(Succeed())
	gpuNode := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
	g.Expect(c.Create(t.Context(), gpuNode)).To(Succeed())
	gpuNode.Status = n.GPU.Status
	g.Expect(c.Status().Update(t.Context(), gpuNode)).To(Succeed())
	for _, namespace := range []string{"team", "gpu-sharing-operator"} {
		g.Expect(c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	}
	pod := func(namespace, name, container string, labels map[string]string) {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels},
			Spec:       corev1.PodSpec{NodeName: n.Name, Containers: []corev1.Container{{Name: container, Image: "example.invalid/x"}, {Name: "proxy", Image: "example.invalid/x"}}},
		}
		g.Expect(c.Create(t.Context(), p)).To(Succeed())
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		g.Expect(c.Status().Update(t.Context(), p)).To(Succeed())
	}
	for _, p := range n.Pods {
		pod(p.Namespace, p.Name, "main", nil)
	}
	pod("gpu-sharing-operator", "agent", "agent", map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"})
}
