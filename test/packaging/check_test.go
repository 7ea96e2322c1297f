// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const checkName = "gpu-sharing-check"

// checkKinds are the kinds of all that a test of the release creates.
var checkKinds = []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "Pod"}

func TestTheCheckReadsAndNothingElse(t *testing.T) {
	g := NewWithT(t)
	objects := newHelm(t).render(t)
	for _, rule := range as[rbacv1.ClusterRole](t, find(t, objects, "ClusterRole "+checkName)).Rules {
		if slices.Equal(rule.Resources, []string{"subjectaccessreviews"}) {
			g.Expect(rule.Verbs).To(Equal([]string{"create"}), "a question")
			continue
		}
		g.Expect(rule.Verbs).To(Equal([]string{"list"}), "%v", rule.Resources)
	}
	for _, kind := range checkKinds {
		annotations := find(t, objects, kind+" "+checkName).GetAnnotations()
		g.Expect(annotations).To(HaveKeyWithValue("helm.sh/hook", "test"), kind)
		g.Expect(annotations).To(HaveKeyWithValue("helm.sh/hook-delete-policy", "before-hook-creation,hook-succeeded,hook-failed"), kind)
	}
	pod := as[corev1.Pod](t, find(t, objects, "Pod "+checkName))
	controller := as[appsv1.Deployment](t, find(t, objects, "Deployment gpu-sharing-controller")).Spec.Template.Spec
	g.Expect(pod.Spec.Containers[0].Image).To(Equal(controller.Containers[0].Image))
	g.Expect(pod.Spec.ServiceAccountName).To(Equal(checkName))
	g.Expect(pod.Spec.RestartPolicy).To(Equal(corev1.RestartPolicyNever))
}

// TestTheCheckKnowsWhoReadsMetrics: without these rights neither Prometheus nor `kubectl gpusharing top` reads the
// agents.
func TestTheCheckKnowsWhoReadsMetrics(t *testing.T) {
	for value, reads := range map[string]bool{"metrics.enabled=true": true, "metrics.enabled=false": false} {
		g := NewWithT(t)
		rights := as[corev1.ConfigMap](t, find(t, newHelm(t).render(t, value), "ConfigMap "+checkName)).Data["rbac.yaml"]
		bound := map[string]bool{}
		for document := range strings.SplitSeq(rights, "\n---\n") {
			var o rbacv1.ClusterRoleBinding
			g.Expect(yaml.Unmarshal([]byte(document), &o)).To(Succeed())
			for _, s := range o.Subjects {
				bound[s.Name] = true
			}
		}
		g.Expect(bound).To(HaveKey("gpu-sharing-agent"), value)
		g.Expect(bound["gpu-sharing-usage"] && bound["gpu-sharing-metrics"]).To(Equal(reads), value)
	}
}

// TestHelmTestSaysWhatIsMissing runs the real Helm and the real program with the token of its pod. Only the kubelet is
// played.
func TestHelmTestSaysWhatIsMissing(t *testing.T) { withEachHelm(t, helmTestSaysWhatIsMissing) }

func helmTestSaysWhatIsMissing(t *testing.T, i installation) {
	t.Helper()
	g := NewWithT(t)
	i.do(t, "install", release, i.chart, "--create-namespace", "--set", "devicePlugin.namespace="+namespace+",devicePlugin.configMap=plugin-configs")
	printed := &logs{}
	agent := i.play(t, printed)
	i.runChecks(t, printed)
	there := func() []string {
		var found []string
		for _, kind := range checkKinds {
			o := object("v1", kind, namespace, checkName)
			if strings.HasPrefix(kind, "ClusterRole") {
				o = object("rbac.authorization.k8s.io/v1", kind, "", checkName)
			}
			if i.exists(t, o) {
				found = append(found, kind)
			}
		}
		return found
	}

	i.do(t, "test", release)
	g.Expect(printed.String()).To(SatisfyAll(
		ContainSubstring("ServiceAccount "+namespace+"/gpu-sharing-agent has its rights"),
		ContainSubstring("ServiceAccount "+namespace+"/gpu-sharing-controller has its rights"), ContainSubstring("0 errors"),
	))
	g.Expect(there()).To(BeEmpty(), "what a test created goes with its success")

	i.do(t, "upgrade", release, i.chart, "--set", "logLevel=debug")
	i.updateController(t)
	tested := make(chan error, 1)
	go func() {
		_, err := i.try(t, "test", release)
		tested <- err
	}()
	g.Eventually(there, time.Minute).Should(ContainElement("Pod"))
	g.Expect(tested).NotTo(Receive(), "it waits for the update of the agents")
	i.updateAgents(t, 1, 1)
	g.Expect(<-tested).NotTo(HaveOccurred())
	g.Expect(printed.String()).To(ContainSubstring("0 errors"))

	g.Expect(i.Client.Delete(t.Context(), agent, client.GracePeriodSeconds(0))).To(Succeed())
	role := &rbacv1.ClusterRole{}
	g.Expect(i.Client.Get(t.Context(), client.ObjectKey{Name: "gpu-sharing-controller"}, role)).To(Succeed())
	for r := range role.Rules {
		if slices.Contains(role.Rules[r].Resources, "clusterpolicies") {
			role.Rules[r].Verbs = slices.DeleteFunc(role.Rules[r].Verbs, func(verb string) bool { return verb == "patch" })
		}
	}
	g.Expect(i.Client.Update(t.Context(), role)).To(Succeed())
	i.dropField(t, "gpunodes.gpusharing.io", "status", "driverVersion")
	_, err := i.try(t, "test", release)
	g.Expect(err).To(MatchError(SatisfyAll(
		ContainSubstring("1 node (n1): no agent"), ContainSubstring("gpu-sharing-controller may not patch clusterpolicies.nvidia.com"),
		ContainSubstring("The CRD of GPUNode is older than this program: it lacks status.driverVersion"), ContainSubstring("3 errors"),
	)), "Helm prints the log of the pod")
	g.Expect(there()).To(BeEmpty(), "what a test created goes with its failure too, since helm uninstall would leave it")
}

// logs are what the program in the pod of the check printed last. They serve it as a kubelet serves the log of a
// container.
type logs struct {
	mu   sync.Mutex
	text string
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text
}

func (l *logs) set(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = text
}

func (l *logs) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/containerLogs/"+namespace+"/"+checkName+"/check" {
		http.NotFound(w, r)
		return
	}
	_, _ = fmt.Fprint(w, l)
}

// dropField removes a field from the schema of a CRD.
func (i installation) dropField(t *testing.T, crd string, fields ...string) {
	t.Helper()
	g := NewWithT(t)
	o := object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", crd)
	g.Expect(i.exists(t, o)).To(BeTrue())
	versions, _, err := unstructured.NestedSlice(o.Object, "spec", "versions")
	g.Expect(err).NotTo(HaveOccurred())
	path := []string{"schema", "openAPIV3Schema"}
	for _, field := range fields {
		path = append(path, "properties", field)
	}
	version, _ := versions[0].(map[string]any)
	_, found, err := unstructured.NestedFieldNoCopy(version, path...)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(found).To(BeTrue())
	unstructured.RemoveNestedField(version, path...)
	g.Expect(unstructured.SetNestedSlice(o.Object, versions, "spec", "versions")).To(Succeed())
	g.Expect(i.Client.Update(t.Context(), o)).To(Succeed())
}

// play plays a cluster in which the operator works on one node, whose kubelet serves logs. It returns the pod of the
// agent.
func (i installation) play(t *testing.T, kubelet http.Handler) (agent *corev1.Pod) {
	t.Helper()
	g := NewWithT(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "n1", Labels: map[string]string{"nvidia.com/gpu.present": "true", "feature.node.kubernetes.io/pci-10de.present": "true"},
	}}
	g.Expect(i.Client.Create(t.Context(), node)).To(Succeed())
	server := httptest.NewTLSServer(kubelet)
	t.Cleanup(server.Close)
	address, isTCP := server.Listener.Addr().(*net.TCPAddr)
	g.Expect(isTCP).To(BeTrue())
	node.Status.NodeInfo.KubeletVersion = "v1.37.1"
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address.IP.String()}}
	node.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(address.Port)
	g.Expect(i.Client.Status().Update(t.Context(), node)).To(Succeed())
	controller, err := i.ClientAs(t.Context(), env.Identity{Namespace: namespace, ServiceAccount: "gpu-sharing-controller"})
	g.Expect(err).NotTo(HaveOccurred())
	g.Eventually(func() error {
		return controller.Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: node.Name}})
	}, 30*time.Second).Should(Succeed())
	g.Expect(client.IgnoreAlreadyExists(i.Client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "default"}}))).To(Succeed())
	for _, app := range []string{"gpu-sharing-agent", "gpu-sharing-controller", "nvidia-device-plugin"} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: app, Labels: map[string]string{"app.kubernetes.io/name": app}},
			Spec:       corev1.PodSpec{NodeName: node.Name, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/x:v0.19.3"}}},
		}
		if app == "nvidia-device-plugin" {
			readsConfigMap(&pod.Spec, "plugin-configs")
			pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "kubelet", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/device-plugins"},
			}})
		}
		g.Expect(i.Client.Create(t.Context(), pod)).To(Succeed())
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		g.Expect(i.Client.Status().Update(t.Context(), pod)).To(Succeed())
		if app == "gpu-sharing-agent" {
			agent = pod
		}
	}
	i.updateAgents(t, 1, 1)
	i.updateController(t)
	g.Expect(i.Client.Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "gpu-sharing-controller"},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: new("gpu-sharing-controller_6d0c"), LeaseDurationSeconds: new(int32(3600)), RenewTime: &metav1.MicroTime{Time: clock.RealClock{}.Now()},
		},
	})).To(Succeed())
	return agent
}

// readsConfigMap makes a pod read a ConfigMap by NVIDIA's config-manager, as in NVIDIA's chart of the device plugin.
func readsConfigMap(spec *corev1.PodSpec, name string) {
	spec.Volumes = append(spec.Volumes, corev1.Volume{Name: "available-configs", VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}},
	}})
	spec.Containers = append(spec.Containers, corev1.Container{
		Name: "config-manager", Image: "example.invalid/x:v0.19.3", Env: []corev1.EnvVar{{Name: "CONFIG_FILE_SRCDIR", Value: "/available-configs"}},
		VolumeMounts: []corev1.VolumeMount{{Name: "available-configs", MountPath: "/available-configs"}},
	})
}

// updateController plays the controller of Deployments: all pods of the operator's controller are as its Deployment is
// now.
func (i installation) updateController(t *testing.T) {
	t.Helper()
	g := NewWithT(t)
	deployment := &appsv1.Deployment{}
	g.Expect(i.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "gpu-sharing-controller"}, deployment)).To(Succeed())
	deployment.Status = appsv1.DeploymentStatus{
		ObservedGeneration: deployment.Generation, Replicas: 2, UpdatedReplicas: 2, ReadyReplicas: 2, AvailableReplicas: 2,
	}
	g.Expect(i.Client.Status().Update(t.Context(), deployment)).To(Succeed())
}

// updateAgents plays the controller of DaemonSets: so many of some agents are as the DaemonSet is now.
func (i installation) updateAgents(t *testing.T, updated, of int32) {
	t.Helper()
	g := NewWithT(t)
	for name, status := range map[string]appsv1.DaemonSetStatus{
		"gpu-sharing-agent": {DesiredNumberScheduled: of, CurrentNumberScheduled: of, UpdatedNumberScheduled: updated}, "gpu-sharing-agent-dra": {}, // no node has a GPUCluster
	} {
		agents := &appsv1.DaemonSet{}
		g.Expect(i.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, agents)).To(Succeed())
		status.ObservedGeneration = agents.Generation
		agents.Status = status
		g.Expect(i.Client.Status().Update(t.Context(), agents)).To(Succeed())
	}
}

// runChecks does what the scheduler and a kubelet do with the pods of the check, until the test ends: it runs the
// program with the token of the pod, and keeps what it prints.
func (i installation) runChecks(t *testing.T, printed *logs) {
	t.Helper()
	g := NewWithT(t)
	program := shipped(t, "controller")
	ctx, stop := context.WithCancel(t.Context())
	pods, err := i.Client.Watch(ctx, &corev1.PodList{}, client.InNamespace(namespace), client.MatchingFields{"metadata.name": checkName})
	g.Expect(err).NotTo(HaveOccurred())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for event := range pods.ResultChan() {
			pod, isPod := event.Object.(*corev1.Pod)
			switch {
			case !isPod:
			case pod.DeletionTimestamp != nil:
				_ = i.Client.Delete(ctx, pod, client.GracePeriodSeconds(0)) // it may be gone
			case pod.Spec.NodeName == "":
				binding := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "n1"}}
				if err := i.Client.SubResource("binding").Create(ctx, pod, binding); client.IgnoreNotFound(err) != nil {
					t.Error(err)
				}
			case pod.Status.Phase == corev1.PodPending:
				out, err := i.runCheck(ctx, t, program, pod)
				printed.set(out)
				if ended := i.end(ctx, pod, err); client.IgnoreNotFound(ended) != nil {
					t.Error(ended)
				}
			}
		}
	}()
	t.Cleanup(func() {
		pods.Stop()
		stop()
		<-ended
	})
}

func (i installation) runCheck(ctx context.Context, t *testing.T, program string, pod *corev1.Pod) (string, error) {
	t.Helper()
	config, err := i.ConfigAs(ctx, env.Identity{Namespace: namespace, ServiceAccount: pod.Spec.ServiceAccountName, Pod: pod.Name})
	if err != nil {
		return "", err
	}
	rights := &corev1.ConfigMap{}
	if err := i.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: pod.Spec.Volumes[0].ConfigMap.Name}, rights); err != nil {
		return "", err
	}
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "rbac.yaml"), []byte(rights.Data["rbac.yaml"]), 0o600); err != nil {
		return "", err
	}
	args := slices.Clone(pod.Spec.Containers[0].Args)
	for n := range args {
		args[n] = strings.Replace(args[n], pod.Spec.Containers[0].VolumeMounts[0].MountPath, folder, 1)
	}
	args = append(args, "--kubeconfig="+env.KubeconfigFile(t, config), "--timeout=10s")
	out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
	return string(out), err
}

// end writes what a kubelet says of a pod whose only program has ended.
func (i installation) end(ctx context.Context, pod *corev1.Pod, failed error) error {
	pod.Status.Phase = corev1.PodSucceeded
	if failed != nil {
		pod.Status.Phase = corev1.PodFailed
	}
	return i.Client.Status().Update(ctx, pod)
}
