// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
)

// foreign are kinds that others bring.
func foreign(o *unstructured.Unstructured) bool {
	group := o.GroupVersionKind().Group
	return group == "monitoring.coreos.com" || group == "security.openshift.io"
}

func TestAPIServerTakesTheChart(t *testing.T) {
	cluster := env.Start(t)
	objects := newHelm(t).render(t, everything()...)
	for _, ns := range []string{namespace, "nvidia-device-plugin"} {
		NewWithT(t).Expect(cluster.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})).To(Succeed())
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: checkName}}
	NewWithT(t).Expect(cluster.Client.Create(t.Context(), account)).To(Succeed(), "without it no pod is admitted")
	for _, o := range objects {
		if foreign(o) {
			continue
		}
		t.Run(name(o), func(t *testing.T) {
			err := cluster.Client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(o), client.DryRunAll, client.ForceOwnership,
				client.FieldOwner("test"))
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
		})
	}
}

// Kubernetes' own PodSecurity admission decides.
func TestPodSecurity(t *testing.T) {
	cluster := env.Start(t)
	restricted := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: "restricted", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"},
	}}
	g := NewWithT(t)
	g.Expect(cluster.Client.Create(t.Context(), restricted)).To(Succeed())
	objects := newHelm(t).render(t, everything()...)
	evaluate := func(spec corev1.PodSpec) error {
		spec.ServiceAccountName = ""
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: restricted.Name, Name: "pod"}, Spec: spec}
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: restricted.Name, Name: "default"}}
		if err := client.IgnoreAlreadyExists(cluster.Client.Create(t.Context(), account)); err != nil {
			return err
		}
		return cluster.Client.Create(t.Context(), pod, client.DryRunAll)
	}

	controller := as[appsv1.Deployment](t, find(t, objects, "Deployment gpu-sharing-controller"))
	g.Expect(evaluate(controller.Spec.Template.Spec)).To(Succeed(), "the controller keeps to the restricted profile")
	g.Expect(evaluate(as[corev1.Pod](t, find(t, objects, "Pod "+checkName)).Spec)).To(Succeed(), "the check keeps to the restricted profile")
	for _, daemonSet := range []string{"DaemonSet gpu-sharing-agent", "DaemonSet gpu-sharing-agent-dra", "DaemonSet gpu-sharing-mps"} {
		err := evaluate(as[appsv1.DaemonSet](t, find(t, objects, daemonSet)).Spec.Template.Spec)
		g.Expect(err).To(MatchError(SatisfyAll(
			ContainSubstring("host namespaces (hostPID=true)"), ContainSubstring("privileged (container"),
			ContainSubstring(`use restricted volume type "hostPath"`),
		)), "the namespace must allow it")
		g.Expect(err).NotTo(MatchError(ContainSubstring("hostPort")))
	}
}

// GKE limits the system priority classes like this.
const limitedPriorityClasses = `
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: ResourceQuota
  configuration:
    apiVersion: apiserver.config.k8s.io/v1
    kind: ResourceQuotaConfiguration
    limitedResources:
    - resource: pods
      matchScopes:
      - {scopeName: PriorityClass, operator: In, values: [system-node-critical, system-cluster-critical]}
`

func TestThePresetForGKEAdmitsThePodsOfTheChart(t *testing.T) {
	g := NewWithT(t)
	config := filepath.Join(t.TempDir(), "admission.yaml")
	g.Expect(os.WriteFile(config, []byte(limitedPriorityClasses), 0o600)).To(Succeed())
	cluster := env.Start(t, env.WithFlag("admission-control-config-file", config))
	g.Expect(cluster.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	g.Expect(cluster.Client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "default"}})).To(Succeed())
	objects, err := newHelm(t).template(t, "--values", path(t, "config/helm/presets/gke.yaml"))
	g.Expect(err).NotTo(HaveOccurred())
	create := func(workload string) error {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "pod-"}, Spec: podOf(t, find(t, objects, workload)).Spec}
		pod.Spec.ServiceAccountName = ""
		return cluster.Client.Create(t.Context(), pod)
	}
	workloads := []string{"Deployment gpu-sharing-controller", "DaemonSet gpu-sharing-agent", "DaemonSet gpu-sharing-agent-dra", "DaemonSet gpu-sharing-mps"}
	for _, workload := range workloads {
		g.Expect(create(workload)).To(MatchError(ContainSubstring("insufficient quota to match these scopes")), workload)
	}

	quota := as[corev1.ResourceQuota](t, find(t, objects, "ResourceQuota gpu-sharing-system-critical"))
	g.Expect(cluster.Client.Create(t.Context(), &quota)).To(Succeed())
	quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: corev1.ResourceList{corev1.ResourcePods: resource.MustParse("0")}}
	g.Expect(cluster.Client.Status().Update(t.Context(), &quota)).To(Succeed(), "as kube-controller-manager does")
	for _, workload := range workloads {
		g.Eventually(create).WithArguments(workload).WithTimeout(30*time.Second).Should(Succeed(), workload)
	}
}

// installation is the chart installed in a cluster by the real Helm.
type installation struct {
	helm
	*env.Cluster
	kubeconfig string
}

// withEachHelm runs a test in a cluster of its own with each version of Helm that users have.
func withEachHelm(t *testing.T, test func(*testing.T, installation), options ...env.Option) {
	t.Helper()
	for title, script := range map[string]string{"Helm 3": helm3, "Helm 4": helm4} {
		t.Run(title, func(t *testing.T) { test(t, newInstallation(t, helmOf(t, script), options...)) })
	}
}

func newInstallation(t *testing.T, h helm, options ...env.Option) installation {
	t.Helper()
	cluster := env.Start(t, options...)
	kubeconfig := env.KubeconfigFile(t, cluster.Config)
	i := installation{helm: h, Cluster: cluster, kubeconfig: kubeconfig}
	i.removeCRDs(t)
	return i
}

// removeCRDs removes those of ours that every cluster of the tests has.
func (i installation) removeCRDs(t *testing.T) {
	t.Helper()
	for _, crd := range []string{"gpunodes.gpusharing.io", "gpusharingpolicies.gpusharing.io"} {
		o := object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", crd)
		NewWithT(t).Expect(i.Client.Delete(t.Context(), o)).To(Succeed())
		NewWithT(t).Eventually(func() bool {
			return apierrors.IsNotFound(i.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o))
		}, 30*time.Second).Should(BeTrue())
	}
}

func object(apiVersion, kind, namespace, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(schema.FromAPIVersionAndKind(apiVersion, kind))
	o.SetNamespace(namespace)
	o.SetName(name)
	return o
}

func (i installation) do(t *testing.T, args ...string) string {
	t.Helper()
	out, err := i.try(t, args...)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return out
}

func (i installation) try(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return i.run(t, append(args, "--kubeconfig", i.kubeconfig, "--namespace", namespace)...)
}

func (i installation) exists(t *testing.T, o *unstructured.Unstructured) bool {
	t.Helper()
	err := i.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o)
	NewWithT(t).Expect(client.IgnoreNotFound(err)).To(Succeed())
	return err == nil
}

// previousChart is the chart of the previous version.
func previousChart(t *testing.T) string {
	t.Helper()
	chart := filepath.Join(t.TempDir(), "chart")
	NewWithT(t).Expect(previous.Folder(t.Context(), "config/helm", chart)).To(Succeed())
	return chart
}

// formerChart is the chart of a version with another schema and fewer values.
func formerChart(t *testing.T) string {
	t.Helper()
	chart := filepath.Join(t.TempDir(), "chart")
	NewWithT(t).Expect(previous.FormerFolder(t.Context(), "config/helm", chart)).To(Succeed())
	return chart
}

func TestInstallUpgradeUninstall(t *testing.T) { withEachHelm(t, installUpgradeUninstall) }

func installUpgradeUninstall(t *testing.T, i installation) {
	t.Helper()
	g := NewWithT(t)
	crd := object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "gpusharingpolicies.gpusharing.io")
	schema := func() apiextensionsv1.JSONSchemaProps {
		g.Expect(i.exists(t, crd)).To(BeTrue())
		return *as[apiextensionsv1.CustomResourceDefinition](t, crd).Spec.Versions[0].Schema.OpenAPIV3Schema
	}
	of := func(read func(context.Context, string) ([]byte, error)) apiextensionsv1.JSONSchemaProps {
		return schemaOf(t, read, "config/crd/gpusharing.io_gpusharingpolicies.yaml")
	}

	out := i.do(t, "install", release, previousChart(t), "--create-namespace")
	g.Expect(out).To(ContainSubstring("kubectl get gpunodes"), "it says what is next")
	g.Expect(schema()).To(Equal(of(previous.File)))
	policy := &v1alpha1.GPUSharingPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "shared"},
		Spec: v1alpha1.GPUSharingPolicySpec{NodeSelector: &v1alpha1.NodeSelector{}, Sharing: v1alpha1.Sharing{
			Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4},
		}},
	}
	g.Eventually(func() error { return i.Client.Create(t.Context(), policy) }, 30*time.Second).Should(Succeed())

	out = i.do(t, "upgrade", release, i.chart)
	g.Expect(out).To(ContainSubstring("MPS pods keep their version until they are deleted"))
	g.Expect(schema()).To(Equal(of(today)), "the CRD is that of the new version")
	i.expectSame(t, policy)

	const narrower = "gpuNodes.selector.pool=shared"
	_, err := i.try(t, "upgrade", release, i.chart, "--set", narrower)
	g.Expect(err).To(MatchError(SatisfyAll(
		ContainSubstring("gpuNodes.selector changes from"), ContainSubstring("mps.changeSelector=true"),
	)), "MPS clients of other nodes would end")
	i.do(t, "upgrade", release, i.chart, "--set", narrower+",mps.changeSelector=true")
	i.do(t, "upgrade", release, i.chart, "--set", "mps.changeSelector=true")

	out = i.do(t, "uninstall", release)
	kept := []*unstructured.Unstructured{
		crd, object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "gpunodes.gpusharing.io"),
		object("apps/v1", "DaemonSet", namespace, "gpu-sharing-mps"), object("v1", "ServiceAccount", namespace, "gpu-sharing-mps"),
	}
	for _, o := range kept {
		g.Expect(i.exists(t, o)).To(BeTrue(), name(o))
		g.Expect(out).To(ContainSubstring("["+o.GetKind()+"] "+o.GetName()), "it says what stays")
	}
	g.Expect(i.exists(t, object("apps/v1", "DaemonSet", namespace, "gpu-sharing-agent"))).To(BeFalse())
	g.Expect(i.exists(t, object("apps/v1", "DaemonSet", namespace, "gpu-sharing-agent-dra"))).To(BeFalse())
	g.Expect(i.exists(t, object("apps/v1", "Deployment", namespace, "gpu-sharing-controller"))).To(BeFalse())
	g.Expect(i.exists(t, object("rbac.authorization.k8s.io/v1", "ClusterRole", "", "gpu-sharing-controller"))).To(BeFalse())
	i.expectSame(t, policy)

	i.do(t, "install", release, i.chart)
	g.Expect(i.exists(t, object("apps/v1", "DaemonSet", namespace, "gpu-sharing-agent"))).To(BeTrue(), "it can be installed again")
	i.expectSame(t, policy)
}

// TestHelmTakesOverNoReleaseOfAnotherNamespace: --take-ownership would give the accounts of the second the rights of the first, whose controller and agents
// then have none, and each node a second MPS pod.
func TestHelmTakesOverNoReleaseOfAnotherNamespace(t *testing.T) {
	withEachHelm(t, func(t *testing.T, i installation) {
		g := NewWithT(t)
		second := func() error {
			_, err := i.run(t, "install", "second", i.chart, "--namespace", "second", "--create-namespace", "--take-ownership", "--kubeconfig", i.kubeconfig)
			return err
		}
		i.do(t, "install", release, i.chart, "--create-namespace")
		g.Expect(second()).To(MatchError(ContainSubstring("the operator is installed in namespace " + namespace + " already, or was")))
		binding := object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "", "gpu-sharing-controller")
		g.Expect(i.exists(t, binding)).To(BeTrue())
		g.Expect(as[rbacv1.ClusterRoleBinding](t, binding).Subjects[0].Namespace).To(Equal(namespace))

		i.do(t, "uninstall", release)
		g.Expect(second()).To(MatchError(ContainSubstring("kubectl delete daemonset -n " + namespace + " gpu-sharing-mps")))
		g.Expect(i.Client.Delete(t.Context(), object("apps/v1", "DaemonSet", namespace, "gpu-sharing-mps"))).To(Succeed())
		g.Expect(second()).To(Succeed())
	})
}

// expectSame checks that nobody wrote a policy since it was created.
func (i installation) expectSame(t *testing.T, policy *v1alpha1.GPUSharingPolicy) {
	t.Helper()
	now := &v1alpha1.GPUSharingPolicy{}
	NewWithT(t).Eventually(func() error { return i.Client.Get(t.Context(), client.ObjectKeyFromObject(policy), now) }, 10*time.Second).Should(Succeed())
	NewWithT(t).Expect(now.UID).To(Equal(policy.UID))
	NewWithT(t).Expect(now.ResourceVersion).To(Equal(policy.ResourceVersion))
}

const (
	release   = "gpu-sharing-operator"
	namespace = "gpu-sharing-operator"
)

// helm is the real Helm, with our chart.
type helm struct {
	program, chart string
	env            []string
}

// The scripts that build the versions of Helm that users have.
const helm3, helm4 = "hack/helm3/build.sh", "hack/helm/build.sh"

func newHelm(tb testing.TB) helm {
	tb.Helper()
	return helmOf(tb, helm4)
}

func helmOf(tb testing.TB, script string) helm {
	tb.Helper()
	return helm{
		program: strings.TrimSpace(run(tb, exec.CommandContext(tb.Context(), path(tb, script)))),
		chart:   path(tb, "config/helm"),
		env:     []string{"HELM_CACHE_HOME=" + tb.TempDir(), "HELM_CONFIG_HOME=" + tb.TempDir(), "HELM_DATA_HOME=" + tb.TempDir()},
	}
}

// run returns what a program printed, and fails the test if it failed.
func run(tb testing.TB, command *exec.Cmd) string {
	tb.Helper()
	out, err := output(command)
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

func output(command *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(command.Args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

// path is that of a file of the repository.
func path(tb testing.TB, elements ...string) string {
	tb.Helper()
	root, err := env.Root()
	if err != nil {
		tb.Fatal(err)
	}
	return filepath.Join(append([]string{root}, elements...)...)
}

func (h helm) run(tb testing.TB, args ...string) (string, error) {
	tb.Helper()
	command := exec.CommandContext(tb.Context(), h.program, args...)
	command.Env = append(os.Environ(), h.env...)
	return output(command)
}

// render is what the chart installs with some values, given as for --set.
func (h helm) render(tb testing.TB, values ...string) []*unstructured.Unstructured {
	tb.Helper()
	objects, err := h.template(tb, set(values)...)
	if err != nil {
		tb.Fatal(err)
	}
	return objects
}

func (h helm) template(tb testing.TB, args ...string) ([]*unstructured.Unstructured, error) {
	tb.Helper()
	out, err := h.run(tb, append([]string{"template", release, h.chart, "--namespace", namespace}, args...)...)
	if err != nil {
		return nil, err
	}
	return env.Objects([]byte(out))
}

func set(values []string) []string {
	var args []string
	for _, value := range values {
		args = append(args, "--set", value)
	}
	return args
}

// everything turns on what is off by default.
func everything() []string {
	return []string{
		"openshift.enabled=true", "networkPolicy.enabled=true", "metrics.enabled=true", "metrics.podMonitor.enabled=true",
		"metrics.prometheusRule.enabled=true", "metrics.dashboard.enabled=true", "logLevel=debug", "agent.allowReboot=true",
		"devicePlugin.namespace=nvidia-device-plugin", "devicePlugin.configMap=plugin-configs", "priorityClassQuota.enabled=true",
	}
}

// TestProgramsHoldTheTimeZones: maintenance windows name time zones, and an image made from scratch has none.
func TestProgramsHoldTheTimeZones(t *testing.T) {
	for _, program := range []string{"controller", "kubectl-gpusharing"} {
		t.Run(program, func(t *testing.T) {
			g := NewWithT(t)
			out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../../cmd/"+program).Output()
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(strings.Fields(string(out))).To(ContainElement("time/tzdata"))
		})
	}
}
