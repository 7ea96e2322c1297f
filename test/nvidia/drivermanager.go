// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import "strings"

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
