// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"os/exec"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// pluginChart is NVIDIA's own chart of its device plugin, of the version whose packages we use.
func pluginChart(t *testing.T) string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/k8s-device-plugin")
	list.Dir = path(t)
	return strings.TrimSpace(run(t, list)) + "/deployments/helm/nvidia-device-plugin"
}

// installPlugin installs the stand-alone device plugin as NVIDIA documents it, with a ConfigMap that the chart makes, and
// lets its DaemonSets have pods.
func (i installation) installPlugin(t *testing.T, namespace string) {
	t.Helper()
	i.installPluginWithoutPods(t, namespace)
	g, sets := NewWithT(t), &appsv1.DaemonSetList{}
	g.Expect(i.Client.List(t.Context(), sets, client.InNamespace(namespace))).To(Succeed())
	g.Expect(sets.Items).NotTo(BeEmpty())
	for _, set := range sets.Items {
		set.Status.CurrentNumberScheduled, set.Status.DesiredNumberScheduled = 1, 1
		g.Expect(i.Client.Status().Update(t.Context(), &set)).To(Succeed())
	}
}

// installPluginWithoutPods is what a tenant can do in their own namespace: make the DaemonSet, whose pods Pod Security
// refuses.
func (i installation) installPluginWithoutPods(t *testing.T, namespace string) {
	t.Helper()
	_, err := i.run(t, "install", "nvdp", pluginChart(t), "--kubeconfig", i.kubeconfig, "--namespace", namespace, "--create-namespace",
		"--set", "config.map.default=version: v1,config.default=default,fullnameOverride="+namespace)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
}

func (i installation) uninstallPlugin(t *testing.T, namespace string) {
	t.Helper()
	_, err := i.run(t, "uninstall", "nvdp", "--kubeconfig", i.kubeconfig, "--namespace", namespace)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
}

// told is what the flags of the installed controller name: namespace and ConfigMap of the device plugin.
func (i installation) told(t *testing.T) (named []string) {
	t.Helper()
	deployment := object("apps/v1", "Deployment", namespace, "gpu-sharing-controller")
	NewWithT(t).Expect(i.exists(t, deployment)).To(BeTrue())
	for _, arg := range as[appsv1.Deployment](t, deployment).Spec.Template.Spec.Containers[0].Args {
		if name, value, _ := strings.Cut(arg, "="); strings.HasPrefix(name, "--device-plugin-") {
			named = append(named, value)
		}
	}
	return named
}

func TestHelmFindsTheDevicePluginThatNoGPUOperatorRuns(t *testing.T) {
	withEachHelm(t, findsTheDevicePlugin, env.WithNVIDIA())
}

func findsTheDevicePlugin(t *testing.T, i installation) {
	t.Helper()
	g := NewWithT(t)
	policy := object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy")
	g.Expect(unstructured.SetNestedMap(policy.Object, map[string]any{"enabled": true}, "spec", "devicePlugin")).To(Succeed())
	g.Expect(i.Client.Create(t.Context(), policy)).To(Succeed())
	i.installPlugin(t, "plugin-a")
	const found = "Policies add keys to the ConfigMap that it reads: "
	g.Expect(i.do(t, "install", release, i.chart, "--create-namespace")).NotTo(ContainSubstring(found))
	g.Expect(i.told(t)).To(BeEmpty(), "the GPU Operator runs the device plugin")
	g.Expect(i.exists(t, object("v1", "ResourceQuota", namespace, "gpu-sharing-system-critical"))).To(BeFalse(), "it is not GKE")

	g.Expect(i.Client.Delete(t.Context(), policy)).To(Succeed())
	i.installPlugin(t, "plugin-b")
	i.do(t, "upgrade", release, i.chart)
	g.Expect(i.told(t)).To(BeEmpty(), "it is not known which of two is meant")

	i.uninstallPlugin(t, "plugin-b")
	i.installPluginWithoutPods(t, "tenant")
	plugin := []string{"plugin-a", "plugin-a-configs"}
	g.Expect(i.do(t, "upgrade", release, i.chart)).To(ContainSubstring(found + strings.Join(plugin, "/")))
	g.Expect(i.told(t)).To(Equal(plugin))
	role := object("rbac.authorization.k8s.io/v1", "Role", plugin[0], "gpu-sharing-controller-device-plugin")
	g.Expect(i.exists(t, role)).To(BeTrue())
	g.Expect(as[rbacv1.Role](t, role).Rules).To(ContainElement(HaveField("ResourceNames", ConsistOf(plugin[1]))))
	guard := object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "", "gpu-sharing-controller-writes")
	g.Expect(i.exists(t, guard)).To(BeTrue())
	g.Expect(as[admissionregistrationv1.ValidatingAdmissionPolicy](t, guard).Spec.Variables).To(ContainElement(
		HaveField("Expression", ContainSubstring("'"+plugin[1]+"'"))))

	i.uninstallPlugin(t, "plugin-a")
	i.do(t, "upgrade", release, i.chart)
	g.Expect(i.told(t)).To(Equal(plugin), "the plugin is away, as while it is installed anew")
	i.do(t, "upgrade", release, i.chart, "--set", "devicePlugin.namespace=plugin-b,devicePlugin.configMap=mine")
	g.Expect(i.told(t)).To(Equal([]string{"plugin-b", "mine"}), "a value counts before what is found")
	i.uninstallPlugin(t, "tenant")
}

// TestHelmForgetsADevicePluginThatTheGPUOperatorReplaced: not while the plugin is there, whose ConfigMap may have the
// operator's keys.
func TestHelmForgetsADevicePluginThatTheGPUOperatorReplaced(t *testing.T) {
	withEachHelm(t, func(t *testing.T, i installation) {
		t.Helper()
		g := NewWithT(t)
		i.installPlugin(t, "plugin-a")
		i.do(t, "install", release, i.chart, "--create-namespace")
		plugin := []string{"plugin-a", "plugin-a-configs"}
		g.Expect(i.told(t)).To(Equal(plugin))
		policy := object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy")
		g.Expect(unstructured.SetNestedMap(policy.Object, map[string]any{"enabled": true}, "spec", "devicePlugin")).To(Succeed())
		g.Expect(i.Client.Create(t.Context(), policy)).To(Succeed())
		i.do(t, "upgrade", release, i.chart)
		g.Expect(i.told(t)).To(Equal(plugin), "both are there")

		i.uninstallPlugin(t, "plugin-a")
		g.Expect(i.do(t, "upgrade", release, i.chart)).NotTo(ContainSubstring("runs without the GPU Operator"))
		g.Expect(i.told(t)).To(BeEmpty())
		role := object("rbac.authorization.k8s.io/v1", "Role", "plugin-a", "gpu-sharing-controller-device-plugin")
		g.Expect(i.exists(t, role)).To(BeFalse())
	}, env.WithNVIDIA())
}

// GKE names itself in the version of Kubernetes.
func TestHelmBringsTheQuotaOnGKE(t *testing.T) {
	plain, err := discovery.NewDiscoveryClientForConfigOrDie(env.Start(t).Config).ServerVersion()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	withEachHelm(t, func(t *testing.T, i installation) {
		t.Helper()
		g := NewWithT(t)
		out := i.do(t, "install", release, i.chart, "--create-namespace")
		g.Expect(out).NotTo(ContainSubstring("insufficient quota"))
		quota := object("v1", "ResourceQuota", namespace, "gpu-sharing-system-critical")
		g.Expect(i.exists(t, quota)).To(BeTrue())
		g.Expect(as[corev1.ResourceQuota](t, quota).Spec.ScopeSelector.MatchExpressions[0].Values).To(ConsistOf("system-cluster-critical", "system-node-critical"))
	}, env.WithFlag("version", plain.GitVersion+"-gke.1463000"))
}
