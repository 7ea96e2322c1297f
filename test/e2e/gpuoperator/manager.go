// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
)

const (
	// ManagerName is the name of mig-manager's DaemonSet, of its account, and the value of its pods' label app.
	ManagerName = "nvidia-mig-manager"
	// ManagerImage is the one with mig-manager and what it runs.
	ManagerImage = "nvcr.io/nvidia/cloud-native/k8s-mig-manager:v0.13.1"
	// LabelMIGState is what mig-manager reports of the layout that LabelMIGConfig names.
	LabelMIGState = "nvidia.com/mig.config.state"

	managerScript  = "nvidia-mig-manager-entrypoint"
	managerClients = "default-gpu-clients"
)

// manager is the DaemonSet of mig-manager, which reads a ConfigMap. The GPU Operator renders it also without one, with
// layouts of its own; here no spec needs that (NVIDIA/gpu-operator v25.10.1 assets/state-mig-manager, which runs
// mig-manager v0.13.1).
func manager(p *clusterPolicy) operand {
	main := privileged(ManagerName, "/bin/sh", "-c", "/bin/entrypoint.sh")
	main.Image = ManagerImage
	main.Env = []corev1.EnvVar{
		downward("NODE_NAME", "spec.nodeName"),
		{Name: "CONFIG_FILE", Value: "/mig-parted-config/config.yaml"},
		{Name: "GPU_CLIENTS_FILE", Value: "/gpu-clients/clients.yaml"},
		downward("DEFAULT_GPU_CLIENTS_NAMESPACE", "metadata.namespace"),
	}
	if p.cdi() {
		setEnv(&main, "CDI_ENABLED", "true")
		setEnv(&main, "NVIDIA_CDI_HOOK_PATH", driver.HookPath)
	}
	main.VolumeMounts = []corev1.VolumeMount{
		entrypointMount(managerScript),
		volumeMount("run-nvidia-validations", "/run/nvidia/validations", ""),
		volumeMount("host-sys", "/sys", ""),
		volumeMount("mig-parted-config", "/mig-parted-config", ""),
		volumeMount("host-root", "/host", corev1.MountPropagationHostToContainer),
		volumeMount("gpu-clients", "/gpu-clients", ""),
		volumeMount("driver-install-dir", "/driver-root", corev1.MountPropagationHostToContainer),
		volumeMount("cdi-root", "/var/run/cdi", ""),
	}
	return operand{
		name: ManagerName, account: ManagerName, nodeSelector: deployedBy("mig-manager"), main: main, hostPID: true,
		volumes: []corev1.Volume{
			configMap(managerScript, managerScript, new(int32(0o700))),
			hostPath("host-sys", "/sys", corev1.HostPathDirectory),
			configMap("mig-parted-config", p.MIGManager.Config.Name, nil),
			hostPath("host-root", "/", ""),
			configMap("gpu-clients", managerClients, nil),
			hostPath("driver-install-dir", "/run/nvidia/driver", corev1.HostPathDirectoryOrCreate),
			hostPath("cdi-root", "/var/run/cdi", corev1.HostPathDirectoryOrCreate),
		},
	}
}

// forManager are the objects that mig-manager needs: what starts it, what of the host it stops where the driver is the
// host's, and what its account may do.
func forManager() []client.Object {
	objects := []client.Object{
		&corev1.ConfigMap{
			TypeMeta: kind("v1", "ConfigMap"), ObjectMeta: named(managerScript),
			Data: map[string]string{
				"entrypoint.sh": entrypoint("WITH_SHUTDOWN_HOST_GPU_CLIENTS=$IS_HOST_DRIVER\nexec " + ManagerName),
			},
		},
		&corev1.ConfigMap{
			TypeMeta: kind("v1", "ConfigMap"), ObjectMeta: named(managerClients),
			Data: map[string]string{"clients.yaml": "version: v1\nsystemd-services: [nvsm.service, nvidia-dcgm.service]\n"},
		},
		&corev1.ServiceAccount{TypeMeta: kind("v1", "ServiceAccount"), ObjectMeta: named(ManagerName)},
		&rbacv1.ClusterRole{
			TypeMeta: kind(rbacAPI, "ClusterRole"), ObjectMeta: metav1.ObjectMeta{Name: ManagerName},
			Rules: []rbacv1.PolicyRule{
				{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch", "update", "patch"}},
			},
		},
		&rbacv1.ClusterRoleBinding{
			TypeMeta: kind(rbacAPI, "ClusterRoleBinding"), ObjectMeta: metav1.ObjectMeta{Name: ManagerName},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: ManagerName},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: Namespace, Name: ManagerName}},
		},
	}
	return append(objects, may(ManagerName, rbacv1.PolicyRule{
		APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch", "delete"},
	})...)
}

func configMap(volume, name string, mode *int32) corev1.Volume {
	return corev1.Volume{Name: volume, VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: name}, DefaultMode: mode,
	}}}
}

// entrypointMount is where a container finds the script that starts it.
func entrypointMount(volume string) corev1.VolumeMount {
	mount := volumeMount(volume, "/bin/entrypoint.sh", "")
	mount.SubPath, mount.ReadOnly = "entrypoint.sh", true
	return mount
}
