// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// LabelPresent is on nodes that have, or once had, GPUs.
	LabelPresent = "nvidia.com/gpu.present"
	// LabelDeploy with the name of an operand says whether its DaemonSet runs on the node.
	LabelDeploy = "nvidia.com/gpu.deploy."
	// LabelMIGConfig names the layout that mig-manager applies.
	LabelMIGConfig = "nvidia.com/mig.config"

	labelOperands = LabelDeploy + "operands"
	migManager    = LabelDeploy + "mig-manager"
)

// deployed are the operands that run on a node for containers; client stands for programs of third parties.
var deployed = []string{
	"driver", "gpu-feature-discovery", "container-toolkit", "device-plugin", "dcgm", "dcgm-exporter", "node-status-exporter",
	"operator-validator", "client",
}

// Event is what makes the GPU Operator set the labels of a node when it changes. It does not when a user removes a
// label that it has set (controllers/nodelabeling_controller.go, v26.7.0: getNodeLabelUpdateReasons).
type Event struct {
	node                                types.UID
	policy, present, operands, workload string
	onPCI, migCapable                   bool
}

// EventOf is that of a node under a ClusterPolicy, which is named with its generation.
func EventOf(n *corev1.Node, policy string, migCapable bool) Event {
	return Event{
		node: n.UID, policy: policy, present: n.Labels[LabelPresent], operands: n.Labels[labelOperands],
		workload: n.Labels["nvidia.com/gpu.workload.config"], onPCI: onPCI(n.Labels), migCapable: migCapable,
	}
}

// Deploys reports whether operands run on a node, by its labels. Where they do not, the GPU Operator removes their
// labels whenever it looks, also those that a user sets; otherwise it sets them after an Event.
func Deploys(labels map[string]string) bool {
	return labels[LabelPresent] == "true" && labels[labelOperands] != "false"
}

// LabelForClusterPolicy changes the labels of a node as the GPU Operator does for a ClusterPolicy, with the layout that it
// gives to nodes without one. A label for an operand that has a value keeps it: other programs stop operands by it
// (controllers/state_manager.go).
func LabelForClusterPolicy(labels map[string]string, migCapable bool, layout string) {
	if !Deploys(labels) {
		for _, operand := range deployed {
			delete(labels, LabelDeploy+operand)
		}
		delete(labels, migManager)
		return
	}
	for _, operand := range deployed {
		if labels[LabelDeploy+operand] == "" {
			labels[LabelDeploy+operand] = "true"
		}
	}
	if _, has := labels[migManager]; !has && migCapable {
		labels[migManager] = "true"
	}
	if migCapable && layout != "" && labels[LabelMIGConfig] == "" {
		labels[LabelMIGConfig] = layout
	}
}

// clusterDeployed are the programs that run on a node of a GPUCluster.
var clusterDeployed = []string{"driver", "dra-driver", "dra-validator", "dcgm-dra", "dcgm-exporter-dra"}

// policyOnly are the programs that only a ClusterPolicy has.
var policyOnly = []string{
	"device-plugin", "gpu-feature-discovery", "container-toolkit", "dcgm", "dcgm-exporter", "node-status-exporter", "operator-validator", "client", "mig-manager",
	"sandbox-device-plugin", "kata-sandbox-device-plugin", "sandbox-validator", "vfio-manager", "kata-manager", "cc-manager", "vgpu-device-manager",
}

// LabelForGPUCluster changes the labels of a node as the GPU Operator does for a GPUCluster, and returns those of a
// ClusterPolicy's programs, which it removes whatever their value. Where a label of its own programs has a value, it
// stays: k8s-driver-manager stops programs by it.
func LabelForGPUCluster(labels map[string]string) (swept []string) {
	for _, program := range policyOnly {
		if _, has := labels[LabelDeploy+program]; has {
			swept = append(swept, LabelDeploy+program)
			delete(labels, LabelDeploy+program)
		}
	}
	for _, program := range clusterDeployed {
		switch {
		case labels[LabelPresent] != "true":
			delete(labels, LabelDeploy+program)
		case labels[LabelDeploy+program] == "":
			labels[LabelDeploy+program] = "true"
		}
	}
	return swept
}

// onPCI reports whether Node Feature Discovery found a GPU of NVIDIA's, by vendor or by class and vendor.
func onPCI(labels map[string]string) bool {
	return slices.ContainsFunc([]string{"10de", "0302_10de", "0300_10de"}, func(device string) bool {
		return labels["feature.node.kubernetes.io/pci-"+device+".present"] == "true"
	})
}

// Discover sets, in a node's labels, the one that says whether it has GPUs, as the GPU Operator does by those of Node
// Feature Discovery.
func Discover(labels map[string]string) {
	switch {
	case onPCI(labels):
		labels[LabelPresent] = "true"
	case labels[LabelPresent] == "true":
		labels[LabelPresent] = "false"
	}
}

// MIGCapable reports whether a node's GPUs can be partitioned, by GPU Feature Discovery's label or else by their
// product.
func MIGCapable(labels map[string]string) bool {
	if labels["nvidia.com/vgpu.host-driver-version"] != "" {
		return false
	}
	if capable, ok := labels["nvidia.com/mig.capable"]; ok {
		return capable == "true"
	}
	product := strings.ToLower(labels["nvidia.com/gpu.product"])
	return slices.ContainsFunc([]string{"h100", "a100", "a30"}, func(name string) bool { return strings.Contains(product, name) })
}
