// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// standAloneOf is the ConfigMap of a device plugin without the GPU Operator that the flags of a controller name.
func standAloneOf(deployment *appsv1.Deployment) (named types.NamespacedName) {
	for _, container := range deployment.Spec.Template.Spec.Containers {
		for _, arg := range container.Args {
			switch flag, value, _ := strings.Cut(arg, "="); flag {
			case "--device-plugin-namespace":
				named.Namespace = value
			case "--device-plugin-configmap":
				named.Name = value
			}
		}
	}
	return named
}

// configRead is the ConfigMap from which NVIDIA's config-manager in a pod takes the configurations of the device plugin
// (k8s-device-plugin, cmd/config-manager); without a name: it has none.
func configRead(pod *corev1.Pod) types.NamespacedName {
	for i := range pod.Spec.Containers {
		container := &pod.Spec.Containers[i]
		for _, variable := range container.Env {
			if variable.Name == "CONFIG_FILE_SRCDIR" {
				return types.NamespacedName{Namespace: pod.Namespace, Name: configMapAt(&pod.Spec, container, variable.Value)}
			}
		}
	}
	return types.NamespacedName{Namespace: pod.Namespace}
}

// configMapAt is the ConfigMap that a container mounts at a path; empty: none.
func configMapAt(spec *corev1.PodSpec, container *corev1.Container, path string) string {
	for _, mount := range container.VolumeMounts {
		for _, volume := range spec.Volumes {
			if mount.MountPath == path && volume.Name == mount.Name && volume.ConfigMap != nil {
				return volume.ConfigMap.Name
			}
		}
	}
	return ""
}

// standAlone diagnoses device plugins that the GPU Operator does not run: policies reach them by the ConfigMap that the
// controller was told.
func (d *diagnosis) standAlone(is installation) {
	var read []string
	for _, n := range is.nodes {
		for _, c := range n.plugins {
			if usesPlugin(n) {
				read = append(read, c.config.String())
			}
		}
	}
	if len(read) == 0 || len(is.controllers) == 0 {
		return // nothing is known of the one or of the other
	}
	slices.Sort(read)
	for _, config := range slices.Compact(read) {
		namespace, name, _ := strings.Cut(config, "/")
		switch {
		case name == "":
			d.error("The device plugin in namespace %s is not the GPU Operator's and reads no ConfigMap, so no policy reaches it. Install it by NVIDIA's chart with config.name "+
				"or config.map, then upgrade the operator", namespace)
		case is.told.Name == "":
			d.error("The device plugin is not the GPU Operator's, and the controller was not told which ConfigMap it reads. Upgrade the operator with "+
				"--set devicePlugin.namespace=%s,devicePlugin.configMap=%s", namespace, name)
		case config != is.told.String():
			d.error("The device plugin reads ConfigMap %s, and the controller was told %s. Upgrade the operator with --set devicePlugin.namespace=%s,devicePlugin.configMap=%s",
				config, is.told, namespace, name)
		default:
			d.ok("The operator configures a stand-alone device plugin by ConfigMap %s", config)
		}
	}
}
