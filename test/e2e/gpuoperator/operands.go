// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"path"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
)

// Names of the DaemonSets, which are the values of their pods' label app.
const (
	// PluginName is that of the device plugin's.
	PluginName = "nvidia-device-plugin-daemonset"

	// FeaturesName is GPU Feature Discovery's.
	FeaturesName = "gpu-feature-discovery"
	// MPSName is that of NVIDIA's MPS control daemon.
	MPSName = "nvidia-device-plugin-mps-control-daemon"

	pluginAccount  = "nvidia-device-plugin"
	featureAccount = "nvidia-gpu-feature-discovery"
	entrypointName = "nvidia-device-plugin-entrypoint"
)

// operands are the names of all DaemonSets that the GPU Operator renders, as far as it is played here.
func operands() []string {
	return []string{PluginName, MPSName, FeaturesName, dcgmName, exporterName, statusName, validatorName, ManagerName}
}

// ReadsConfig reports whether the programs of a DaemonSet, by the value of its pods' label app, read the device
// plugin's configuration.
func ReadsConfig(app string) bool { return app == PluginName || app == FeaturesName || app == MPSName }

// plugin is the device plugin. What stands in its environment cannot be set in its configuration file.
func plugin(p *clusterPolicy) operand {
	main := privileged("nvidia-device-plugin", "/bin/sh", "-c", "/bin/entrypoint.sh")
	main.Env = append([]corev1.EnvVar{
		{Name: "PASS_DEVICE_SPECS", Value: "true"},
		{Name: "FAIL_ON_INIT_ERROR", Value: "true"},
		{Name: "DEVICE_LIST_STRATEGY", Value: "envvar"},
		{Name: "DEVICE_ID_STRATEGY", Value: "uuid"},
		{Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"},
		{Name: "NVIDIA_DRIVER_CAPABILITIES", Value: "all"},
		{Name: "MPS_ROOT", Value: p.DevicePlugin.MPS.Root},
	}, p.DevicePlugin.Env...)
	setCDI(&main, p)
	main.VolumeMounts = []corev1.VolumeMount{
		entrypointMount(entrypointName),
		volumeMount("device-plugin", "/var/lib/kubelet/device-plugins", ""),
		volumeMount("run-nvidia-validations", "/run/nvidia/validations", ""),
		volumeMount("driver-install-dir", "/driver-root", corev1.MountPropagationHostToContainer),
		volumeMount("host-root", "/host", corev1.MountPropagationHostToContainer),
		volumeMount("cdi-root", "/var/run/cdi", ""),
		volumeMount("mps-shm", "/dev/shm", ""),
		volumeMount("mps-root", "/mps", ""),
	}
	return operand{
		name: PluginName, account: pluginAccount,
		nodeSelector: map[string]string{"nvidia.com/gpu.deploy.device-plugin": "true"},
		main:         main, process: "nvidia-device-plugin",
		volumes: append([]corev1.Volume{
			configMap(entrypointName, entrypointName, new(int32(0o700))),
			hostPath("device-plugin", "/var/lib/kubelet/device-plugins", ""),
			hostPath("driver-install-dir", "/run/nvidia/driver", corev1.HostPathDirectoryOrCreate),
			hostPath("host-root", "/", ""),
			hostPath("cdi-root", "/var/run/cdi", corev1.HostPathDirectoryOrCreate),
		}, mpsVolumes(p)...),
	}
}

// setCDI lets the device plugin hand out devices by CDI (controllers/object_controls.go, TransformDevicePlugin).
func setCDI(c *corev1.Container, p *clusterPolicy) {
	if !p.cdi() {
		return
	}
	setEnv(c, "DEVICE_LIST_STRATEGY", "cdi-annotations,cdi-cri")
	setEnv(c, "CDI_ANNOTATION_PREFIX", "nvidia.cdi.k8s.io/")
	setEnv(c, "NVIDIA_CDI_HOOK_PATH", driver.HookPath)
}

// featureDiscovery is GPU Feature Discovery, which reads the configuration of the device plugin.
func featureDiscovery(p *clusterPolicy) operand {
	main := privileged("gpu-feature-discovery", "gpu-feature-discovery")
	main.Env = append([]corev1.EnvVar{
		{Name: "GFD_SLEEP_INTERVAL", Value: "60s"},
		{Name: "GFD_FAIL_ON_INIT_ERROR", Value: "true"},
		downward("NAMESPACE", "metadata.namespace"),
		downward("NODE_NAME", "spec.nodeName"),
		downward("POD_NAME", "metadata.name"),
	}, p.GFD.Env...)
	sys := volumeMount("host-sys", "/sys", "")
	sys.ReadOnly = true
	main.VolumeMounts = []corev1.VolumeMount{
		volumeMount("output-dir", "/etc/kubernetes/node-feature-discovery/features.d", ""), sys,
	}
	return operand{
		name: FeaturesName, account: featureAccount,
		labels:       map[string]string{"app.kubernetes.io/part-of": "nvidia-gpu"},
		nodeSelector: map[string]string{"nvidia.com/gpu.deploy.gpu-feature-discovery": "true"},
		main:         main, process: "gpu-feature-discovery",
		volumes: []corev1.Volume{
			hostPath("output-dir", "/etc/kubernetes/node-feature-discovery/features.d", corev1.HostPathDirectoryOrCreate),
			hostPath("host-sys", "/sys", ""),
		},
	}
}

// mpsDaemon is NVIDIA's MPS control daemon, which every node gets that GPU Feature Discovery calls capable of MPS.
func mpsDaemon(p *clusterPolicy) operand {
	mounts := privileged("mps-control-daemon-mounts", "mps-control-daemon", "mount-shm")
	mounts.VolumeMounts = []corev1.VolumeMount{volumeMount("mps-root", "/mps", corev1.MountPropagationBidirectional)}
	main := privileged("mps-control-daemon-ctr", "mps-control-daemon")
	main.Env = []corev1.EnvVar{
		downward("NODE_NAME", "spec.nodeName"),
		{Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"},
		{Name: "NVIDIA_DRIVER_CAPABILITIES", Value: "compute,utility"},
	}
	main.VolumeMounts = []corev1.VolumeMount{volumeMount("mps-shm", "/dev/shm", ""), volumeMount("mps-root", "/mps", "")}
	return operand{
		name: MPSName, account: pluginAccount,
		nodeSelector: map[string]string{"nvidia.com/gpu.deploy.device-plugin": "true", "nvidia.com/mps.capable": "true"},
		before:       []corev1.Container{mounts},
		// The name that the operator gives config-manager never matches: a known bug of NVIDIA's (contract, 2.5).
		main: main, process: "/usr/bin/mps-control-daemon",
		volumes: mpsVolumes(p), hostPID: true,
	}
}

func mpsVolumes(p *clusterPolicy) []corev1.Volume {
	return []corev1.Volume{
		hostPath("mps-root", p.DevicePlugin.MPS.Root, corev1.HostPathDirectoryOrCreate),
		hostPath("mps-shm", path.Join(p.DevicePlugin.MPS.Root, "shm"), ""),
	}
}
