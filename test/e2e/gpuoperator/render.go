// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"maps"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// RuntimeClass is that of NVIDIA's pods.
const RuntimeClass = "nvidia"

// Image is the one with NVIDIA's programs.
const Image = "nvcr.io/nvidia/k8s-device-plugin:v0.19.3"

// operand is one of NVIDIA's programs, before the configuration of the device plugin is added to it.
type operand struct {
	// name of the DaemonSet, and the value of its pods' label app.
	name, account string
	// labels of the pods besides app.
	labels       map[string]string
	nodeSelector map[string]string
	// main is the container that reads the configuration, and process the name by which config-manager signals it.
	// Empty: it reads none.
	main    corev1.Container
	process string
	// mounts run before main.
	before  []corev1.Container
	volumes []corev1.Volume
	hostPID bool
	// onHost says that it reaches the driver through the node's files, and not as a container of the NVIDIA runtime.
	onHost bool
}

// render makes the DaemonSets. Nothing but the device plugin turns the MPS DaemonSet on or off.
func render(p *clusterPolicy) []*appsv1.DaemonSet {
	var operands []operand
	if p.DevicePlugin.enabled() {
		operands = append(operands, plugin(p), mpsDaemon(p))
	}
	if p.GFD.enabled() {
		operands = append(operands, featureDiscovery(p))
	}
	if p.DCGM.enabled() {
		operands = append(operands, dcgm())
	}
	if p.DCGMExporter.enabled() {
		operands = append(operands, dcgmExporter())
	}
	if on := p.NodeStatusExporter.Enabled; on != nil && *on { // off where nothing is said
		operands = append(operands, statusExporter())
	}
	if p.MIGManager.enabled() && p.MIGManager.Config.Name != "" {
		operands = append(operands, manager(p))
	}
	operands = append(operands, validator())
	var sets []*appsv1.DaemonSet
	for _, o := range operands {
		if o.process != "" {
			setMIG(&o.main, p.MIG.Strategy)
		}
		sets = append(sets, daemonSet(o, p))
	}
	return sets
}

func daemonSet(o operand, p *clusterPolicy) *appsv1.DaemonSet {
	labels := map[string]string{"app": o.name}
	maps.Copy(labels, o.labels)
	spec := podSpec(o, p)
	unavailable := intstr.Parse(p.Daemonsets.RollingUpdate.MaxUnavailable)
	return &appsv1.DaemonSet{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apps/v1", Kind: "DaemonSet"},
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: o.name, Labels: labels},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: annotations(spec, p)}, Spec: spec},
			UpdateStrategy: appsv1.DaemonSetUpdateStrategy{
				Type:          appsv1.RollingUpdateDaemonSetStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxUnavailable: &unavailable},
			},
		},
	}
}

func podSpec(o operand, p *clusterPolicy) corev1.PodSpec {
	validations := volumeMount("run-nvidia-validations", "/run/nvidia/validations", corev1.MountPropagationHostToContainer)
	toolkit := privileged("toolkit-validation", "sh", "-c",
		"until [ -f /run/nvidia/validations/toolkit-ready ]; do echo waiting for the container toolkit; sleep 1; done")
	toolkit.VolumeMounts = []corev1.VolumeMount{validations}
	spec := corev1.PodSpec{
		NodeSelector:       o.nodeSelector,
		Tolerations:        p.Daemonsets.Tolerations,
		PriorityClassName:  "system-node-critical",
		ServiceAccountName: o.account,
		RuntimeClassName:   runtimeClass(p),
		HostPID:            o.hostPID,
		InitContainers:     append([]corev1.Container{toolkit}, o.before...),
		Volumes:            append(slices.Clone(o.volumes), hostPath("run-nvidia-validations", "/run/nvidia/validations", corev1.HostPathDirectoryOrCreate)),
	}
	if o.onHost {
		spec.RuntimeClassName, spec.InitContainers = nil, o.before
	}
	return withConfig(spec, o, p)
}

// runtimeClass is that of NVIDIA's pods. In NRI mode there is none.
func runtimeClass(p *clusterPolicy) *string {
	if p.CDI.NRI {
		return nil
	}
	return new(RuntimeClass)
}

// annotations are those by which the toolkit's NRI plugin gives NVIDIA's pods the driver, one for each container
// (controllers/object_controls.go, applyNRIAnnotations).
func annotations(spec corev1.PodSpec, p *clusterPolicy) map[string]string {
	if !p.CDI.NRI {
		return nil
	}
	all := map[string]string{}
	for _, c := range append(slices.Clone(spec.InitContainers), spec.Containers...) {
		all["nvidia.cdi.k8s.io/container."+c.Name] = "management.nvidia.com/gpu=all"
	}
	return all
}

// withConfig adds the configuration of the device plugin: the ConfigMap's keys, config-manager once before the program
// and once beside it, and a place where the two meet. Without a ConfigMap there is nothing of it.
func withConfig(spec corev1.PodSpec, o operand, p *clusterPolicy) corev1.PodSpec {
	name := p.DevicePlugin.Config.Name
	if name == "" || o.process == "" {
		spec.Containers = []corev1.Container{o.main}
		return spec
	}
	// The volume is called as the ConfigMap is.
	mounts := []corev1.VolumeMount{{Name: "config", MountPath: "/config"}, {Name: name, MountPath: "/available-configs"}}
	spec.Volumes = append(spec.Volumes,
		corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: name},
		}}},
		corev1.Volume{Name: "config", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	if !o.hostPID { // config-manager must see the program that it signals
		spec.ShareProcessNamespace = new(true)
	}
	setEnv(&o.main, "CONFIG_FILE", "/config/config.yaml")
	o.main.VolumeMounts = append(o.main.VolumeMounts, mounts...)
	first, beside := configManager(p, "", mounts), configManager(p, o.process, mounts)
	first.SecurityContext = nil
	spec.InitContainers = append(spec.InitContainers, first)
	spec.Containers = []corev1.Container{o.main, beside}
	return spec
}

// configManager is NVIDIA's program that selects a key by the node's label: once, or for ever and telling a process.
func configManager(p *clusterPolicy, process string, mounts []corev1.VolumeMount) corev1.Container {
	once, name, signal := "true", "config-manager-init", ""
	if process != "" {
		once, name, signal = "false", "config-manager", "1" // SIGHUP
	}
	c := privileged(name, "config-manager")
	c.VolumeMounts = mounts
	c.Env = []corev1.EnvVar{
		{Name: "ONESHOT", Value: once},
		{Name: "KUBECONFIG"},
		downward("NODE_NAME", "spec.nodeName"),
		{Name: "NODE_LABEL", Value: "nvidia.com/device-plugin.config"},
		{Name: "CONFIG_FILE_SRCDIR", Value: "/available-configs"},
		{Name: "CONFIG_FILE_DST", Value: "/config/config.yaml"},
		{Name: "DEFAULT_CONFIG", Value: p.DevicePlugin.Config.Default},
		{Name: "FALLBACK_STRATEGIES", Value: "empty"},
		{Name: "SEND_SIGNAL", Value: map[bool]string{true: "true", false: "false"}[process != ""]},
		{Name: "SIGNAL", Value: signal},
		{Name: "PROCESS_TO_SIGNAL", Value: process},
	}
	return c
}

// setMIG hands on the ClusterPolicy's strategy. Empty: each node's configuration decides.
func setMIG(c *corev1.Container, strategy string) {
	if strategy != "" {
		setEnv(c, "MIG_STRATEGY", strategy)
	}
	if strategy != "none" {
		setEnv(c, "NVIDIA_MIG_MONITOR_DEVICES", "all")
	}
}

func setEnv(c *corev1.Container, name, value string) {
	for i := range c.Env {
		if c.Env[i].Name == name {
			c.Env[i].Value = value
			return
		}
	}
	c.Env = append(c.Env, corev1.EnvVar{Name: name, Value: value})
}

func privileged(name string, command ...string) corev1.Container {
	return corev1.Container{
		Name: name, Image: Image, Command: command, ImagePullPolicy: corev1.PullIfNotPresent,
		SecurityContext: &corev1.SecurityContext{Privileged: new(true)},
	}
}

func downward(name, path string) corev1.EnvVar {
	return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}}
}

func volumeMount(name, path string, propagation corev1.MountPropagationMode) corev1.VolumeMount {
	m := corev1.VolumeMount{Name: name, MountPath: path}
	if propagation != "" {
		m.MountPropagation = &propagation
	}
	return m
}

func hostPath(name, path string, kind corev1.HostPathType) corev1.Volume {
	source := &corev1.HostPathVolumeSource{Path: path}
	if kind != "" {
		source.Type = &kind
	}
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: source}}
}
