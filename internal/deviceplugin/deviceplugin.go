// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin renders the configuration of NVIDIA's device plugin and knows what a node must then advertise.
// It is pure. The format is `version: v1` of NVIDIA/k8s-device-plugin, api/config/v1.
package deviceplugin

import (
	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// Config is a configuration of the device plugin for nodes that share their GPUs alike.
type Config struct {
	// Key names the content: <policy>-<hash>. It is valid as key of a ConfigMap and as value of a label, and differs
	// whenever the plugin has to look again: when Data differs or the MIG instances do.
	Key string
	// Data is the YAML document.
	Data string
	// Resources are the extended resources that the node must advertise, each with its number.
	Resources map[string]int64
	// Replicas are the resources that are advertised more than once, each with its factor.
	Replicas map[string]int32
}

// Node is what of a node matters to the configuration.
type Node struct {
	// Devices are all GPUs of the node as they are, which those that Wish does not list stay.
	Devices []v1alpha1.DeviceStatus
	// Wish is how the selected GPUs shall be.
	Wish []v1alpha1.DeviceSpec
}

// Render is the configuration for a node under a policy's sharing, whose profiles Wish has resolved. Errors: a
// *plan.Problem for what NVIDIA's device plugin cannot advertise.
func Render(policy string, s v1alpha1.Sharing, n Node) (Config, error) { panic("not written yet") }
