// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin renders the configuration of NVIDIA's device plugin and knows what a node must then advertise.
// It is pure. The format is `version: v1` of NVIDIA/k8s-device-plugin, api/config/v1.
//
// The plugin shares per node and resource name, never per GPU, and refuses to start on much that it cannot advertise;
// what it would refuse is a Problem here, so that a key once written is one that the plugin accepts.
package deviceplugin

import (
	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// MPSRoot is the directory of a node below which MPS control daemons and the device plugin meet. It is NVIDIA's
// default; under the GPU Operator the plugin takes ClusterPolicy.spec.devicePlugin.mps.root, whatever the configuration
// says.
const MPSRoot = "/run/nvidia/mps"

// StrategyMixed is the value of flags.migStrategy, and of ClusterPolicy.spec.mig.strategy, that names instances by their profiles.
const StrategyMixed = "mixed"

// The values of flags.migStrategy.
const (
	migNone   = "none"
	migSingle = "single"
	migMixed  = StrategyMixed
)

// Config is a configuration of the device plugin for nodes that share their GPUs alike.
type Config struct {
	// Key names the content: <policy>-<hash>. It is valid as key of a ConfigMap and as value of a label, and differs
	// whenever the plugin has to look again: when Data differs or the MIG instances do.
	Key string
	// Twin is another key for the same content; empty: there is none. The plugin looks again when a node selects it.
	Twin string
	// Data is the YAML document.
	Data string
	// Resources are the extended resources that the node must advertise, each with its number.
	Resources map[string]int64
	// Replicas are the resources that are advertised more than once, each with its factor.
	Replicas map[string]int32
}

// Node is what of a node matters to the configuration.
type Node struct {
	// Devices are all GPUs of the node as they are, which stay so unless Desired lists them.
	Devices []v1alpha1.DeviceStatus
	// Desired is the desired state of the selected GPUs.
	Desired []v1alpha1.DeviceSpec
	// Replicas are the MIG profiles, by their exact names, whose instances are advertised more than once, each with its
	// factor (plan.Replicas).
	Replicas map[string]int32
}

// Render is the configuration for a node under a policy's sharing, whose profiles Desired has resolved. Errors: a
// *plan.Problem for what NVIDIA's device plugin cannot advertise.
func Render(policy string, s v1alpha1.Sharing, n Node) (Config, error) {
	gpus := n.gpus()
	doc, err := document(s, n)
	if err != nil {
		return Config{}, err
	}
	if err := advertisable(doc, gpus); err != nil {
		return Config{}, err
	}
	resources, replicas := doc.advertised(gpus)
	data := doc.yaml()
	return Config{
		Key:       key(policy, data+geometry(gpus)),
		Data:      data,
		Resources: resources,
		Replicas:  replicas,
	}, nil
}

// WithTwin is a configuration with two keys that name it by what the GPUs have at rest: however their instances follow demand, the ConfigMap
// stays as it is.
func (c Config) WithTwin(policy string, rests Config) Config {
	c.Key, c.Twin = key(policy, rests.Key+" a"), key(policy, rests.Key+" b")
	return c
}

// Keys are the keys of a configuration.
func (c Config) Keys() []string {
	if c.Twin == "" {
		return []string{c.Key}
	}
	return []string{c.Key, c.Twin}
}

// Default is the configuration for nodes that no policy governs, once ClusterPolicy.spec.mig.strategy was emptied: the
// plugin then does there what that field asked for. An empty strategy is the plugin's own default, none.
func Default(migStrategy string) Config {
	if migStrategy == "" {
		migStrategy = migNone
	}
	data := config{migStrategy: migStrategy}.yaml()
	return Config{Key: key("default", data), Data: data}
}
