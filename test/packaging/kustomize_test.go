// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// kustomized is what kubectl apply -k installs.
func kustomized(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	return built(t, path(t, "config/default"))
}

// built is what kubectl apply -k installs of a folder.
func built(t *testing.T, folder string) []*unstructured.Unstructured {
	t.Helper()
	build := exec.CommandContext(t.Context(), "go", "tool", "-modfile="+path(t, "hack/tools/go.mod"), "kustomize", "build", folder)
	objects, err := env.Objects([]byte(run(t, build)))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return objects
}

func TestChartAndKustomizeInstallTheSame(t *testing.T) {
	g := NewWithT(t)
	sources, rendered := kustomized(t), withoutTests(newHelm(t).render(t))
	onlyHere := map[string]string{
		"Namespace gpu-sharing-operator":             "Helm makes the namespace of a release itself",
		"PodDisruptionBudget gpu-sharing-controller": "one replica needs none",
	}
	var common []string
	for _, o := range append(sources, rendered...) {
		if onlyHere[name(o)] == "" {
			common = append(common, name(o))
		}
	}
	for _, wanted := range common {
		find(t, sources, wanted)
		find(t, rendered, wanted)
	}
	workloads := []string{"Deployment gpu-sharing-controller", "DaemonSet gpu-sharing-agent", "DaemonSet gpu-sharing-agent-dra", "DaemonSet gpu-sharing-mps"}
	for _, workload := range workloads {
		ours, theirs := podOf(t, find(t, rendered, workload)), podOf(t, find(t, sources, workload))
		container, its := ours.Spec.Containers[0], theirs.Spec.Containers[0]
		g.Expect(container.Args).To(ContainElements(its.Args), workload)
		its.Env = slices.DeleteFunc(its.Env, func(e corev1.EnvVar) bool { // the chart has values for it
			return e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil
		})
		g.Expect(container.Env).To(Equal(its.Env), workload)
		g.Expect(container.VolumeMounts).To(ConsistOf(its.VolumeMounts), workload)
		g.Expect(container.SecurityContext).To(Equal(its.SecurityContext), workload)
		g.Expect(container.Resources).To(Equal(its.Resources), workload)
		g.Expect(container.LivenessProbe).To(Equal(its.LivenessProbe), workload)
		g.Expect(container.ReadinessProbe).To(Equal(its.ReadinessProbe), workload)
		g.Expect(withoutImages(ours.Spec.InitContainers)).To(Equal(withoutImages(theirs.Spec.InitContainers)), workload)
		g.Expect(ours.Spec.Volumes).To(ConsistOf(theirs.Spec.Volumes), workload)
		g.Expect(ours.Spec.HostPID).To(Equal(theirs.Spec.HostPID), workload)
		g.Expect(ours.Spec.NodeSelector).To(Equal(theirs.Spec.NodeSelector), workload)
		if workload != "Deployment gpu-sharing-controller" { // the chart spreads its two replicas
			g.Expect(ours.Spec.Affinity).To(Equal(theirs.Spec.Affinity), workload)
		}
		g.Expect(ours.Spec.PriorityClassName).To(Equal(theirs.Spec.PriorityClassName), workload)
		g.Expect(ours.Spec.ServiceAccountName).To(Equal(theirs.Spec.ServiceAccountName), workload)
		g.Expect(ours.Spec.SecurityContext).To(Equal(theirs.Spec.SecurityContext), workload)
		delete(ours.Labels, "app.kubernetes.io/version") // kustomize knows none, and names the images by tag
		g.Expect(ours.Labels).To(Equal(theirs.Labels), workload)
	}
}

// withoutTests are the objects of a chart that Helm installs, without those of `helm test`.
func withoutTests(objects []*unstructured.Unstructured) []*unstructured.Unstructured {
	return slices.DeleteFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetAnnotations()["helm.sh/hook"] == "test" })
}

// podOf is the pod template of a Deployment or DaemonSet, or a pod.
func podOf(tb testing.TB, o *unstructured.Unstructured) corev1.PodTemplateSpec {
	tb.Helper()
	switch o.GetKind() {
	case "DaemonSet":
		return as[appsv1.DaemonSet](tb, o).Spec.Template
	case "Pod":
		return corev1.PodTemplateSpec{Spec: as[corev1.Pod](tb, o).Spec}
	}
	return as[appsv1.Deployment](tb, o).Spec.Template
}

func withoutImages(containers []corev1.Container) []corev1.Container {
	plain := slices.Clone(containers)
	for i := range plain {
		plain[i].Image, plain[i].ImagePullPolicy = "", ""
	}
	return plain
}

// TestComponents: with them a kustomization installs what the chart installs on request.
func TestComponents(t *testing.T) {
	config, g := t.TempDir(), NewWithT(t)
	g.Expect(os.CopyFS(config, os.DirFS(path(t, "config")))).To(Succeed())
	g.Expect(os.Mkdir(filepath.Join(config, "mine"), 0o755)).To(Succeed())
	const mine = "resources: [../default]\ncomponents: [../autoscaling, ../memory-limits]\n"
	g.Expect(os.WriteFile(filepath.Join(config, "mine", "kustomization.yaml"), []byte(mine), 0o600)).To(Succeed())
	ours, charts := built(t, filepath.Join(config, "mine")), newHelm(t).render(t, "autoscaling.manage=true", "featureGates.MemoryLimits=true")
	const role = "ClusterRole gpu-sharing-controller-autoscaling"
	g.Expect(as[rbacv1.ClusterRole](t, find(t, ours, role)).Rules).To(Equal(as[rbacv1.ClusterRole](t, find(t, charts, role)).Rules))
	for _, agents := range []string{"DaemonSet gpu-sharing-agent", "DaemonSet gpu-sharing-agent-dra"} {
		pod, its := podOf(t, find(t, ours, agents)).Spec, podOf(t, find(t, charts, agents)).Spec
		g.Expect(pod.Containers[0].Args).To(ConsistOf(its.Containers[0].Args), agents)
		g.Expect(pod.Containers[0].VolumeMounts).To(ConsistOf(its.Containers[0].VolumeMounts), agents)
		g.Expect(pod.Volumes).To(ConsistOf(its.Volumes), agents)
	}
}
