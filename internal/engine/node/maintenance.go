// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// What begins the value of v1alpha1.AnnotationInterrupted.
const (
	stampMaintenance = "maintenance"
	StampAgentLost   = "agent-lost"
	stampInUse       = "in-use"
)

// maintenance is work of another controller on the node as a whole. No change begins meanwhile.
type maintenance struct {
	Reason, Message string
	// Unloads says that the driver is still to be unloaded.
	Unloads bool
	// Validates says that the upgrade ends once the device plugin runs with the new driver.
	Validates bool
}

// UnderMaintenance is the maintenance that the node is under, if it is.
func UnderMaintenance(v *View) (m maintenance, is bool) {
	state := v.Node.Labels[cluster.LabelUpgrade]
	waits := state == cluster.UpgradeRequired && v.Node.Labels[cluster.LabelUpgradeSkip] == "true" // it waits for ever
	paused := pausedForUpgrade(v)
	current, desired := v.Node.Annotations[cluster.AnnotationCurrentConfig], v.Node.Annotations[cluster.AnnotationDesiredConfig]
	m.Reason = v1alpha1.ReasonDriverUpgrade
	switch {
	case state == cluster.UpgradeFailed:
		m.Message = fmt.Sprintf("The upgrade of NVIDIA's driver failed on the node (%s=%s). Look at the logs of the driver's pod there "+
			"(%s), then retry: kubectl label node %s --overwrite %s=%s",
			cluster.LabelUpgrade, state, driverPodLabels(v), v.Node.Name, cluster.LabelUpgrade, cluster.UpgradeRequired)
	case state != "" && state != cluster.UpgradeDone && !waits:
		m.Message = fmt.Sprintf("Paused for a driver upgrade (%s=%s)", cluster.LabelUpgrade, state)
		m.Unloads = slices.Contains(unloadingStates(), state)
		m.Validates = !m.Unloads && state != cluster.UpgradeRequired
	case paused != "":
		m.Message = fmt.Sprintf("Paused for a driver upgrade (%s=%s)", paused, v.Node.Labels[paused])
		m.Unloads = true
	case desired != current:
		m.Reason = v1alpha1.ReasonNodeMaintenance
		m.Message = fmt.Sprintf("Paused for OpenShift's machine-config operator, which is updating the node (%s=%s, now %s)",
			cluster.AnnotationDesiredConfig, desired, current)
	default:
		return maintenance{}, false
	}
	return m, true
}

// driverPodLabels are the labels of the pods of NVIDIA's driver: those of a ClusterPolicy, or of an NVIDIADriver, which a GPUCluster needs
// (NVIDIA/gpu-operator internal/state/driver.go, v26.7.0).
func driverPodLabels(v *View) string {
	const ofNVIDIADriver = "app.kubernetes.io/component=nvidia-driver"
	if cluster.OfGPUCluster(v.Node.Labels) {
		return ofNVIDIADriver
	}
	return "app=nvidia-driver-daemonset, or with an NVIDIADriver " + ofNVIDIADriver
}

// unloadingStates are the states of an upgrade in which the old driver may still be loaded.
func unloadingStates() []string {
	return []string{
		"node-maintenance-required", "cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required",
		"pod-restart-required",
	}
}

// PausedForUpgrade is a deploy label that k8s-driver-manager has paused; empty if there is none.
func pausedForUpgrade(v *View) string {
	first := ""
	for name, value := range v.Node.Labels {
		if strings.HasPrefix(name, cluster.DeployPrefix) && strings.Contains(value, cluster.PausedForUpgrade) && (first == "" || name < first) {
			first = name
		}
	}
	return first
}

// agentMakesInstances reports whether the agent has been asked for MIG instances.
func agentMakesInstances(v *View) bool {
	spec := v.Node.GPU.Spec
	return v.ByGPUOperator() && spec.MIGActuator == "" &&
		slices.ContainsFunc(spec.Devices, func(d v1alpha1.DeviceSpec) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled })
}

// InterruptedAt is when maintenance interrupted a change; ok is false if none did.
func InterruptedAt(v *View) (at time.Time, ok bool) {
	return timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationInterrupted], stampMaintenance)
}

// AgentLostAt is when the controller recorded that the agent was lost during a change; ok is false if it did not.
func AgentLostAt(v *View) (at time.Time, ok bool) {
	return timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationInterrupted], StampAgentLost)
}

// interruptedByUsersAt is when the controller recorded that users of the GPUs interrupt a change; ok is false if it did not.
func interruptedByUsersAt(v *View) (at time.Time, ok bool) {
	return timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationInterrupted], stampInUse)
}

// WasInterrupted reports whether a change was interrupted, by maintenance, by users or because the agent was lost.
func WasInterrupted(v *View) bool {
	_, maintained := InterruptedAt(v)
	_, lost := AgentLostAt(v)
	_, used := interruptedByUsersAt(v)
	return maintained || lost || used
}

// interruptionOverdue reports whether the change was interrupted for so long that it keeps no slot in the budget.
func interruptionOverdue(v *View) bool {
	at, was := InterruptedAt(v)
	return was && v.Snapshot.Now.Sub(at) >= timing.MaintenanceTimeout
}
