// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

const (
	// ClusterName is the GPUCluster's name, as NVIDIA's Helm chart gives it.
	ClusterName = "gpu-cluster"
	// DRAName is that of the DaemonSet of NVIDIA's DRA driver, and the value of its pods' label app.
	DRAName = "nvidia-dra-driver-kubelet-plugin"

	draAccount = "nvidia-dra-driver-kubeletplugin"
	// draHealth is the port on which the driver says whether it is registered with the kubelet.
	draHealth = 51516
)

// ClusterKind is the GPUCluster's.
func ClusterKind() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: "nvidia.com", Version: "v1alpha1", Kind: "GPUCluster"}
}

// runCluster does what the GPU Operator does for a GPUCluster, in every reconcile: it applies the objects of NVIDIA's
// DRA driver, also if another controller changed them, and labels the nodes. It installs no DCGM and no validator here.
func (o *Operator) runCluster(ctx context.Context, c *unstructured.Unstructured) error {
	image, _, err := unstructured.NestedString(c.Object, "spec", "draDriver", "image")
	if err != nil {
		return fmt.Errorf("reading the GPUCluster: %w", err)
	}
	var errs []error
	for _, object := range draObjects() {
		errs = append(errs, o.apply(ctx, object))
	}
	return errors.Join(append(errs, o.applySets(ctx, c, draDaemonSet(image)),
		o.labelNodes(ctx, func(n *corev1.Node) map[string]string { return clusterLabelled(n.Labels) }),
		nodesim.WriteStatus(ctx, o.client, c, nvidia.Reports(c, Namespace, time.Now())))...)
}

// clusterLabelled returns a node's labels as the GPU Operator writes them for a GPUCluster.
func clusterLabelled(now map[string]string) map[string]string {
	labels := discovered(now)
	nvidia.LabelForGPUCluster(labels)
	return labels
}

// draDaemonSet is NVIDIA's DRA driver as the GPU Operator runs it: with none of the labels of the driver's chart.
func draDaemonSet(image string) *appsv1.DaemonSet {
	const validations, registry, plugins = "/run/nvidia/validations", "/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins"
	labels := map[string]string{"app": DRAName, "app.kubernetes.io/name": "nvidia-dra-driver", "app.kubernetes.io/component": DRAName}
	driver := volumeMount("driver-root", "/driver-root", corev1.MountPropagationHostToContainer)
	ready := volumeMount("validations", validations, corev1.MountPropagationHostToContainer)
	wait := privileged("driver-validation", "bash", "-c", "until [ -f "+validations+"/driver-ready ]; do echo waiting for the driver; sleep 1; done")
	wait.Image, wait.VolumeMounts = image, []corev1.VolumeMount{driver, ready}
	main := privileged("gpus", "bash", "-c", "set -o allexport; . "+validations+"/driver-ready; exec gpu-kubelet-plugin -v 4")
	main.Image = image
	main.Env = []corev1.EnvVar{
		downward("NODE_NAME", "spec.nodeName"),
		downward("NAMESPACE", "metadata.namespace"),
		{Name: "IMAGE_NAME", Value: image},
		{Name: "NVIDIA_VISIBLE_DEVICES", Value: "void"},
		{Name: "NVIDIA_MIG_CONFIG_DEVICES", Value: "all"},
		{Name: "CDI_ROOT", Value: "/var/run/cdi"},
		{Name: "KUBELET_REGISTRAR_DIRECTORY_PATH", Value: registry},
		{Name: "KUBELET_PLUGINS_DIRECTORY_PATH", Value: plugins},
		{Name: "HEALTHCHECK_PORT", Value: fmt.Sprint(draHealth)},
	}
	main.VolumeMounts = []corev1.VolumeMount{
		driver, ready, volumeMount("registry", registry, ""), volumeMount("plugins", plugins, corev1.MountPropagationBidirectional),
		volumeMount("cdi", "/var/run/cdi", ""),
	}
	main.StartupProbe = &corev1.Probe{
		ProbeHandler:     corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: draHealth, Service: new("liveness")}},
		FailureThreshold: 600, PeriodSeconds: 1, TimeoutSeconds: 10,
	}
	all := intstr.FromString("100%")
	return &appsv1.DaemonSet{
		TypeMeta: kind("apps/v1", "DaemonSet"), ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: DRAName, Labels: labels},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": DRAName}},
			UpdateStrategy: appsv1.DaemonSetUpdateStrategy{
				Type: appsv1.RollingUpdateDaemonSetStrategyType, RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxUnavailable: &all},
			},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
				NodeSelector:       map[string]string{LabelDeploy + "dra-driver": "true"},
				Tolerations:        []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
				PriorityClassName:  "system-node-critical",
				ServiceAccountName: draAccount,
				InitContainers:     []corev1.Container{wait},
				Containers:         []corev1.Container{main},
				Volumes: []corev1.Volume{
					hostPath("driver-root", "/run/nvidia/driver", corev1.HostPathDirectoryOrCreate), hostPath("validations", validations, corev1.HostPathDirectoryOrCreate),
					hostPath("registry", registry, ""), hostPath("plugins", plugins, ""), hostPath("cdi", "/var/run/cdi", corev1.HostPathDirectoryOrCreate),
				},
			}},
		},
	}
}

// draObjects are the account of NVIDIA's DRA driver, its rights, and its DeviceClasses, none of which has the name of
// an extended resource.
func draObjects() []client.Object {
	reads := []string{"get", "list", "watch"}
	objects := []client.Object{
		&corev1.ServiceAccount{TypeMeta: kind("v1", "ServiceAccount"), ObjectMeta: named(draAccount)},
		&rbacv1.ClusterRole{
			TypeMeta: kind(rbacAPI, "ClusterRole"), ObjectMeta: metav1.ObjectMeta{Name: draAccount},
			Rules: []rbacv1.PolicyRule{
				{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"}, Verbs: reads},
				{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"}, Verbs: slices.Concat(reads, []string{"create", "update", "delete"})},
				{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: slices.Concat(reads, []string{"update", "patch"})},
				{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: reads},
			},
		},
		&rbacv1.ClusterRoleBinding{
			TypeMeta: kind(rbacAPI, "ClusterRoleBinding"), ObjectMeta: metav1.ObjectMeta{Name: draAccount},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: draAccount},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: Namespace, Name: draAccount}},
		},
	}
	for _, device := range []string{"gpu", "mig"} {
		class := nvidia.DeviceClass(device)
		class.TypeMeta = kind("resource.k8s.io/v1", "DeviceClass")
		objects = append(objects, class)
	}
	return objects
}
