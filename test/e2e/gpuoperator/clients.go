// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import corev1 "k8s.io/api/core/v1"

// ClientImage is the one with what stands for NVIDIA's programs that have GPUs open (test/e2e/programs/nvidia-operand).
const ClientImage = "nvcr.io/nvidia/operand:e2e"

// Names of the DaemonSets and accounts of programs that have GPUs open and read no configuration.
const (
	dcgmName      = "nvidia-dcgm"
	exporterName  = "nvidia-dcgm-exporter"
	statusName    = "nvidia-node-status-exporter"
	validatorName = "nvidia-operator-validator"
)

// standIn is a privileged container of the stand-in for one of NVIDIA's programs.
func standIn(name, operand string) corev1.Container {
	c := privileged(name, "/nvidia-operand", operand)
	c.Image = ClientImage
	c.Env = []corev1.EnvVar{downward("NODE_NAME", "spec.nodeName"), downward("OPERATOR_NAMESPACE", "metadata.namespace")}
	return c
}

// dcgm is nv-hostengine in a pod of its own. Its probes wait 15 s at first in NVIDIA's manifest; here it has none.
func dcgm() operand {
	main := standIn("nvidia-dcgm-ctr", "dcgm")
	main.Env = append(main.Env, corev1.EnvVar{Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"})
	return operand{name: dcgmName, account: dcgmName, nodeSelector: deployedBy("dcgm"), main: main}
}

// dcgmExporter asks nv-hostengine. Its probes wait 45 s at first in NVIDIA's manifest; here it has none.
func dcgmExporter() operand {
	main := standIn("nvidia-dcgm-exporter", "exporter")
	main.Env = append(main.Env, corev1.EnvVar{Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"})
	pods := volumeMount("pod-gpu-resources", "/var/lib/kubelet/pod-resources", "")
	pods.ReadOnly = true
	main.VolumeMounts = []corev1.VolumeMount{pods}
	return operand{
		name: exporterName, account: exporterName, nodeSelector: deployedBy("dcgm-exporter"), main: main,
		volumes: []corev1.Volume{hostPath("pod-gpu-resources", "/var/lib/kubelet/pod-resources", "")},
	}
}

// statusExporter is node-status-exporter, whose label nothing stops.
func statusExporter() operand {
	main := standIn("nvidia-node-status-exporter", "status")
	main.Env = append(main.Env, corev1.EnvVar{Name: "NVIDIA_VISIBLE_DEVICES", Value: "void"})
	host := volumeMount("host-root", "/host", corev1.MountPropagationHostToContainer)
	host.ReadOnly = true
	main.VolumeMounts = []corev1.VolumeMount{volumeMount("run-nvidia", "/run/nvidia", corev1.MountPropagationHostToContainer), host}
	return operand{
		name: statusName, account: statusName, nodeSelector: deployedBy("node-status-exporter"), main: main, onHost: true,
		volumes: []corev1.Volume{hostPath("run-nvidia", "/run/nvidia", corev1.HostPathDirectory), hostPath("host-root", "/", "")},
	}
}

// validator is the operator's validator, as far as it concerns GPUs: the step that computes on them. The files that say
// that the driver is ready come with the driver.
func validator() operand {
	return operand{
		name: validatorName, account: validatorName,
		labels: map[string]string{"app.kubernetes.io/part-of": "gpu-operator"}, nodeSelector: deployedBy("operator-validator"),
		before: []corev1.Container{standIn("cuda-validation", "cuda")},
		main:   standIn(validatorName, "rest"),
	}
}

func deployedBy(operand string) map[string]string {
	return map[string]string{LabelDeploy + operand: "true"}
}
