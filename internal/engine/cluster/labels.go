// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// StoppedValue is what NVIDIA's mig-manager sets deploy labels to meanwhile, so that NVIDIA's other tools recognise it.
const StoppedValue = "paused-for-mig-change"

// DeployLabels start and stop NVIDIA's operands on a node, in the order in which mig-manager stops them, and then
// those that the GPU Operator runs for a GPUCluster.
func DeployLabels() []string {
	return []string{
		DeployPrefix + "device-plugin", DeployPrefix + "gpu-feature-discovery", DeployPrefix + "dcgm", DeployPrefix + "dcgm-exporter",
		DeployPrefix + "nvsm", DeployPrefix + "dcgm-dra", DeployPrefix + "dcgm-exporter-dra",
	}
}

// MonitorLabels start and stop DCGM and its exporter, of a ClusterPolicy and of a GPUCluster.
func MonitorLabels() []string {
	return []string{DeployPrefix + "dcgm", DeployPrefix + "dcgm-exporter", DeployPrefix + "dcgm-dra", DeployPrefix + "dcgm-exporter-dra"}
}

// LabelDRADriver starts and stops NVIDIA's DRA driver on the nodes of a GPUCluster, where the GPU Operator sets it and
// removes the labels that only programs of a ClusterPolicy have, whatever their value, v1alpha1.LabelRunsAgent among
// them (controllers/nodelabeling_controller.go, v26.7.0).
const LabelDRADriver = DeployPrefix + "dra-driver"

// LabelPresent reports whether the GPU Operator takes a node for one with GPUs of NVIDIA's; it is false on one that had
// some.
const LabelPresent = NvidiaDomain + "gpu.present"

// OfGPUCluster reports whether, by the labels of a node, the GPU Operator runs NVIDIA's DRA driver there, for a
// GPUCluster.
func OfGPUCluster(labels map[string]string) bool { return labels[LabelDRADriver] != "" }

// AgentLabel is the label that starts and stops the agent on a node.
func AgentLabel(n *Node) string {
	if OfGPUCluster(n.Labels) {
		return LabelDRADriver
	}
	return v1alpha1.LabelRunsAgent
}

// AnnotationMachine names, on a node of OpenShift, the Machine that it belongs to.
const AnnotationMachine = "machine.openshift.io/machine"

// NVIDIA's upgrade controller takes a node through the states of LabelUpgrade (NVIDIA/k8s-operator-libs
// pkg/upgrade/consts.go). In pod-restart-required its k8s-driver-manager switches the deploy labels off, unloads the driver,
// and restores the labels. It does the latter alone where a driver pod restarts by itself.
const (
	LabelUpgrade     = NvidiaDomain + "gpu-driver-upgrade-state"
	LabelUpgradeSkip = NvidiaDomain + "gpu-driver-upgrade.skip"
	UpgradeRequired  = "upgrade-required"
	UpgradeDone      = "upgrade-done"
	UpgradeFailed    = "upgrade-failed"
	UpgradeValidates = "validation-required"
	UpgradeUncordons = "uncordon-required"
	// StoppedForUpgrade is in the value of each deploy label that k8s-driver-manager has stopped.
	StoppedForUpgrade = "paused-for-driver-upgrade"
)

// OpenShift's machine-config operator updates a node whose two annotations differ: it cordons, drains and reboots it.
const (
	AnnotationCurrentConfig = machineConfig + "currentConfig"
	AnnotationDesiredConfig = machineConfig + "desiredConfig"
	machineConfig           = "machineconfiguration.openshift.io/"
)

// OfMaintenance reports whether an annotation of a Node reports that the node is under maintenance.
func OfMaintenance(annotation string) bool {
	return annotation == AnnotationCurrentConfig || annotation == AnnotationDesiredConfig
}

// The values of v1alpha1.LabelMIGConfigState.
const (
	ManagerPending   = "pending"
	ManagerRebooting = "rebooting"
	ManagerSuccess   = "success"
	ManagerFailed    = "failed"
)

// ManagerAtWork reports whether a state of NVIDIA's mig-manager is one in which it has begun and not ended.
func ManagerAtWork(state string) bool { return state == ManagerPending || state == ManagerRebooting }

// The values of labels that are on or off, such as LabelMPSCapable and the deploy labels.
const (
	LabelTrue  = "true"
	LabelFalse = "false"
)

// groupLabels are the labels of nodes in groups that Cluster Autoscaler may scale, as the clouds set them: of EKS, GKE
// and AKS.
var groupLabels = []string{"eks.amazonaws.com/nodegroup", "cloud.google.com/gke-nodepool", "kubernetes.azure.com/agentpool"}

// annotationClusterAPIMachine names, on a node, its Machine of Cluster API. Source: kubernetes-sigs/cluster-api,
// api/core/v1beta2/common_types.go.
const annotationClusterAPIMachine = "cluster.x-k8s.io/machine"

// OfMachine reports whether an annotation of a Node names the Machine that the node belongs to.
func OfMachine(annotation string) bool {
	return annotation == AnnotationMachine || annotation == annotationClusterAPIMachine
}

// InGroup reports whether the node belongs to a group that Cluster Autoscaler may scale.
func InGroup(n *Node) bool {
	return n.Annotations[AnnotationMachine] != "" || n.Annotations[annotationClusterAPIMachine] != "" ||
		slices.ContainsFunc(groupLabels, func(label string) bool { return n.Labels[label] != "" })
}
