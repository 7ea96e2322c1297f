// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvidia is what NVIDIA's software, and what of Kubernetes stands beside it, makes of what it reads, as functions
// over values: no client, no clock, no node. All that play such a program in tests ask it: the cluster in miniature of
// internal/engine/rollout, test/nodesim, and the stand-in for the GPU Operator of test/e2e/gpuoperator. Each rule says
// where it is taken from.
package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// resourceGPU is what whole GPUs, and under the MIG strategy single also MIG devices, are advertised as.
const resourceGPU = "nvidia.com/gpu"

// Advertised is a device that the plugin offers to the kubelet.
type Advertised struct {
	ID   string // the UUID of a GPU or MIG device, followed by ::n for the nth replica
	UUID string // of the GPU or MIG device
}

// Environment is what the GPU Operator sets in the plugin's environment. It beats the configuration (flags.go).
type Environment struct{ MIGStrategy, MPSRoot string }

// SelectConfig is which file of a ConfigMap config-manager hands on: the one that the node's label names, else the
// default, else none, which stands for the plugin's defaults (cmd/config-manager, updateConfigName, with
// FALLBACK_STRATEGIES=empty, as the GPU Operator sets it). On an error it exits.
func SelectConfig(label, byDefault string, files map[string]string) (name string, err error) {
	name = cmp.Or(label, byDefault)
	_, exists := files[name]
	switch {
	case len(files) == 0:
		return "", errors.New("no configuration files available")
	case name != "" && !exists:
		return "", fmt.Errorf("specified config %s does not exist", name)
	}
	return name, nil
}

// Parse reads a configuration as the plugin does (config.go, parseConfigFrom). Empty content is the plugin's defaults.
func Parse(content string) (*spec.Config, error) {
	config := &spec.Config{}
	if err := yaml.Unmarshal([]byte(content), config); err != nil {
		return nil, fmt.Errorf("unable to parse config file: unmarshal error: %w", err)
	}
	if config.Version == "" {
		config.Version = spec.Version
	}
	if config.Version != spec.Version {
		return nil, fmt.Errorf("unknown version: %v", config.Version)
	}
	spec.DisableResourceNamingInConfig(config)
	return config, nil
}

// Advertise is what the plugin advertises under a configuration, by resource, or why it refuses to start.
func Advertise(config *spec.Config, env Environment, gpus []gpu.Device) (map[string][]Advertised, error) {
	strategy := MIGStrategy(config, env)
	mps := config.Sharing.SharingStrategy() == spec.SharingStrategyMPS
	if err := validateFlags(config, env, strategy, mps); err != nil {
		return nil, err
	}
	devices, migDevices, err := byResource(strategy, gpus)
	if err != nil {
		return nil, err
	}
	if mps && migDevices {
		return nil, errors.New("sharing using MPS is not supported for MIG devices") // internal/plugin/mps.go
	}
	return replicate(config.Sharing.ReplicatedResources(), devices), nil
}

// MIGStrategy is the one that the plugin and GPU Feature Discovery follow.
func MIGStrategy(config *spec.Config, env Environment) string {
	if env.MIGStrategy != "" {
		return env.MIGStrategy
	}
	if config.Flags.MigStrategy != nil && *config.Flags.MigStrategy != "" {
		return *config.Flags.MigStrategy
	}
	return spec.MigStrategyNone
}

// validateFlags is that of cmd/nvidia-device-plugin/main.go.
func validateFlags(config *spec.Config, env Environment, strategy string, mps bool) error {
	switch strategy {
	case spec.MigStrategyNone, spec.MigStrategySingle, spec.MigStrategyMixed:
	default:
		return fmt.Errorf("unknown MIG strategy: %v", strategy)
	}
	if !mps {
		return nil
	}
	if strategy == spec.MigStrategyMixed {
		return errors.New("using --mig-strategy=mixed is not supported with MPS")
	}
	if env.MPSRoot == "" && (config.Flags.MpsRoot == nil || *config.Flags.MpsRoot == "") {
		return errors.New("using MPS requires --mps-root to be specified")
	}
	return nil
}

// byResource is internal/rm/device_map.go: which devices go by which name, and whether there are MIG devices among
// them.
func byResource(strategy string, gpus []gpu.Device) (devices map[string][]string, mig bool, err error) {
	switch strategy {
	case spec.MigStrategySingle:
		return single(gpus)
	case spec.MigStrategyMixed:
		return mixed(gpus)
	default:
		return map[string][]string{resourceGPU: uuids(gpus)}, false, nil
	}
}

func resourceMIG(profile string) string {
	return "nvidia.com/mig-" + strings.ReplaceAll(profile, "+", ".")
}

func uuids(gpus []gpu.Device) []string {
	var all []string
	for _, d := range gpus {
		all = append(all, d.UUID)
	}
	return all
}

func single(gpus []gpu.Device) (map[string][]string, bool, error) {
	enabled := 0
	profiles := map[string]bool{}
	var instances []string
	for _, d := range gpus {
		if !d.State.MIG {
			continue
		}
		enabled++
		mine := migDevices(d)
		if len(mine) == 0 {
			return nil, false, fmt.Errorf("at least one device with migEnabled=true was not configured correctly: "+
				"device %d has an invalid MIG configuration", d.Index)
		}
		for _, i := range mine {
			profiles[i.Profile] = true
			instances = append(instances, i.UUID)
		}
	}
	switch {
	case enabled == 0:
		return map[string][]string{resourceGPU: uuids(gpus)}, false, nil
	case enabled != len(gpus):
		return nil, false, errors.New("all devices on the node must be configured with the same migEnabled value")
	case len(profiles) > 1:
		return nil, false, errors.New("more than one MIG device type present on node")
	}
	return map[string][]string{resourceGPU: instances}, true, nil
}

func mixed(gpus []gpu.Device) (map[string][]string, bool, error) {
	devices, mig := map[string][]string{}, false
	for _, d := range gpus {
		if !d.State.MIG {
			devices[resourceGPU] = append(devices[resourceGPU], d.UUID)
			continue
		}
		for _, i := range migDevices(d) {
			name := resourceMIG(i.Profile)
			devices[name] = append(devices[name], i.UUID)
			mig = true
		}
	}
	return devices, mig, nil
}

// MPSCapable is what GPU Feature Discovery says as nvidia.com/mps.capable, or its error: then its labels stay
// (internal/lm/nvml.go, isMPSCapable).
func MPSCapable(config *spec.Config, gpus func() []gpu.Device) (bool, error) {
	if config.Sharing.SharingStrategy() != spec.SharingStrategyMPS {
		return false, nil
	}
	for _, d := range gpus() {
		if d.State.MIG {
			return false, errors.New("MPS sharing is not supported for mig devices")
		}
	}
	return true, nil
}

// migDevices are the instances that NVML makes devices of: those with a compute instance.
func migDevices(d gpu.Device) []gpu.Instance {
	var devices []gpu.Instance
	for _, i := range d.State.Instances {
		if i.UUID != "" {
			devices = append(devices, i)
		}
	}
	return devices
}

// replicate is internal/rm/device_map.go, updateDeviceMapWithReplicas. Resources that the node does not have are
// skipped without a word.
func replicate(sharing *spec.ReplicatedResources, devices map[string][]string) map[string][]Advertised {
	all := map[string][]Advertised{}
	replicated := map[string]bool{}
	if sharing != nil {
		for _, r := range sharing.Resources {
			name := string(r.Name)
			replicated[name] = true
			to := name
			if r.Rename != "" {
				to = string(r.Rename)
			}
			for _, uuid := range devices[name] {
				for i := range r.Replicas {
					all[to] = append(all[to], Advertised{ID: fmt.Sprintf("%s::%d", uuid, i), UUID: uuid})
				}
			}
		}
	}
	for name, uuids := range devices {
		if replicated[name] {
			continue
		}
		for _, uuid := range uuids {
			all[name] = append(all[name], Advertised{ID: uuid, UUID: uuid})
		}
	}
	return all
}
