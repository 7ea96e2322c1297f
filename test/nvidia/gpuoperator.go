// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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

// Reports are the writes by which the GPU Operator tells in the status of a ClusterPolicy or GPUCluster that it follows
// where it runs and, of a new one, that its pods are not there yet. The condition has a write of its own
// (clusterpolicy_controller.go: updateCRState; internal/conditions). Each makes a patch fail that names the resource
// version before it.
func Reports(object *unstructured.Unstructured, namespace string, now time.Time) []map[string]any {
	state, ready := "notReady", "False"
	switch stateOf(object) {
	case "ready":
		return nil
	case "notReady":
		state, ready = "ready", "True"
	}
	return []map[string]any{{"state": state, "namespace": namespace}, {"conditions": conditions("Ready", ready, "Reconciled", state, now)}}
}

// Ignores are those for a ClusterPolicy beside the one that counts.
func Ignores(object *unstructured.Unstructured, namespace string) []map[string]any {
	if stateOf(object) == "ignored" {
		return nil
	}
	return []map[string]any{{"state": "ignored", "namespace": namespace}}
}

// Refuses are those for a GPUCluster beside a ClusterPolicy (controllers/gpucluster_controller.go: validatePrerequisites).
func Refuses(object *unstructured.Unstructured, namespace string, now time.Time) []map[string]any {
	if stateOf(object) == "notReady" {
		return nil
	}
	return []map[string]any{{
		"state": "notReady", "namespace": namespace,
		"conditions": conditions("Error", "True", "PrerequisiteNotMet", "A ClusterPolicy CR exists; a ClusterPolicy CR and GPUCluster CR may not exist at the same time", now),
	}}
}

func stateOf(object *unstructured.Unstructured) string {
	state, _, _ := unstructured.NestedString(object.Object, "status", "state")
	return state
}

func conditions(of, status, reason, message string, now time.Time) []any {
	return []any{map[string]any{
		"type": of, "status": status, "reason": reason, "message": message, "lastTransitionTime": now.UTC().Format(time.RFC3339),
	}}
}

// States of a node in an upgrade of the driver, the values of LabelUpgrade.
const (
	LabelUpgrade = "nvidia.com/gpu-driver-upgrade-state"

	CordonRequired      = "cordon-required"
	PodDeletionRequired = "pod-deletion-required"
	PodRestartRequired  = "pod-restart-required"
	ValidationRequired  = "validation-required"
	UncordonRequired    = "uncordon-required"
	UpgradeDone         = "upgrade-done"
	UpgradeFailed       = "upgrade-failed"
)

// UpgradeStates are those through which the GPU Operator's upgrade controller takes a node, in their order, in full or
// where only the driver's pod restarts (NVIDIA/k8s-operator-libs pkg/upgrade/consts.go).
func UpgradeStates(restart bool) []string {
	if restart {
		return []string{"upgrade-required", CordonRequired, PodRestartRequired, ValidationRequired, UncordonRequired, UpgradeDone}
	}
	return slices.Insert(UpgradeStates(true), 2, "wait-for-jobs-required", PodDeletionRequired)
}

const paused = "paused-for-driver-upgrade"

// PauseForUpgrade returns the deploy labels that k8s-driver-manager writes to a node with these labels: before it
// unloads the driver, and to restore them. Most it writes on every node, with no value where the label was absent
// (NVIDIA/k8s-driver-manager v0.12.0, cmd/driver-manager/main.go).
func PauseForUpgrade(labels map[string]string) (before, after map[string]string) {
	before, after = map[string]string{}, map[string]string{}
	for _, operand := range []string{
		"operator-validator", "container-toolkit", "device-plugin", "gpu-feature-discovery", "dcgm-exporter", "dcgm", "nvsm",
		"sandbox-validator", "sandbox-device-plugin", "vgpu-device-manager", "dra-validator", "dcgm-dra", "dcgm-exporter-dra",
		"mig-manager", "client", "dra-driver",
	} {
		name := LabelDeploy + operand
		value := labels[name]
		if ifSet := operand == "mig-manager" || operand == "client" || operand == "dra-driver"; !ifSet || value != "" {
			before[name], after[name] = pausedForUpgrade(value), restored(value)
		}
	}
	return before, after
}

// pausedForUpgrade keeps a value that is another's.
func pausedForUpgrade(value string) string {
	switch {
	case value == "" || value == "false" || strings.Contains(value, paused):
		return value
	case value == "true":
		return paused
	}
	return value + "_" + paused
}

func restored(value string) string {
	if value == paused {
		return "true"
	}
	return strings.Trim(strings.ReplaceAll(strings.ReplaceAll(value, paused+"_", ""), paused, ""), "_")
}
