// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// resourceGPU is what whole GPUs, and under the MIG strategy single also MIG devices, are advertised as.
const resourceGPU = "nvidia.com/gpu"

// advertised is a device that the plugin offers to the kubelet.
type advertised struct {
	ID   string // the UUID of a GPU or MIG device, followed by ::n for the nth replica
	UUID string // of the GPU or MIG device
}

// environment is what the GPU Operator sets in the plugin's environment. It beats the configuration (flags.go).
type environment struct {
	migStrategy string
	mpsRoot     string
}

// parse reads a configuration as the plugin does (config.go, parseConfigFrom). Empty content is the plugin's defaults.
func parse(content string) (*spec.Config, error) {
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

// enumerate is what the plugin advertises under a configuration, by resource, or why it refuses to start.
func enumerate(config *spec.Config, env environment, gpus []gpu.Device) (map[string][]advertised, error) {
	strategy := migStrategy(config, env)
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

func migStrategy(config *spec.Config, env environment) string {
	if env.migStrategy != "" {
		return env.migStrategy
	}
	if config.Flags.MigStrategy != nil && *config.Flags.MigStrategy != "" {
		return *config.Flags.MigStrategy
	}
	return spec.MigStrategyNone
}

// validateFlags is that of cmd/nvidia-device-plugin/main.go.
func validateFlags(config *spec.Config, env environment, strategy string, mps bool) error {
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
	if env.mpsRoot == "" && (config.Flags.MpsRoot == nil || *config.Flags.MpsRoot == "") {
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
			name := "nvidia.com/mig-" + strings.ReplaceAll(i.Profile, "+", ".")
			devices[name] = append(devices[name], i.UUID)
			mig = true
		}
	}
	return devices, mig, nil
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
func replicate(sharing *spec.ReplicatedResources, devices map[string][]string) map[string][]advertised {
	all := map[string][]advertised{}
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
					all[to] = append(all[to], advertised{ID: fmt.Sprintf("%s::%d", uuid, i), UUID: uuid})
				}
			}
		}
	}
	for name, uuids := range devices {
		if replicated[name] {
			continue
		}
		for _, uuid := range uuids {
			all[name] = append(all[name], advertised{ID: uuid, UUID: uuid})
		}
	}
	return all
}

// allocatedDevice is a device that a container holds.
type allocatedDevice struct {
	container, resource, id string
}

// admit allocates the devices that a pod asks for, once. A pod that cannot have them fails for good, as with the
// kubelet.
func (k *kubelet) admit(state *podState) {
	if state.admitted || state.refused != "" || len(state.claims) > 0 {
		return
	}
	var devices []allocatedDevice
	for _, c := range state.pod.Spec.Containers {
		for name, quantity := range c.Resources.Limits {
			if !isExtended(name) {
				continue
			}
			got, err := k.allocate(c.Name, string(name), int(quantity.Value()), devices)
			if err != nil {
				state.refused = "Allocate failed due to " + err.Error()
				k.Tell("kubelet: pod %s/%s is refused: %s", state.pod.Namespace, state.pod.Name, state.refused)
				return
			}
			devices = append(devices, got...)
		}
	}
	state.admitted, state.devices = true, devices
}

func isExtended(name corev1.ResourceName) bool {
	return len(name) > len("nvidia.com/") && name[:len("nvidia.com/")] == "nvidia.com/"
}

// allocate picks free devices of a resource, first those whose GPU or instance has the fewest replicas given away, as
// the plugin's policy "distributed" prefers.
func (k *kubelet) allocate(container, resource string, count int, mine []allocatedDevice) ([]allocatedDevice, error) {
	e, ok := k.endpoints[resource]
	if !ok || e.gone {
		return nil, fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s, which is unexpected", resource)
	}
	if e.failGreaterThanOne && count > 1 {
		return nil, fmt.Errorf("rpc error: invalid request: maximum request size for shared resources is 1; found %d, which is unexpected", count)
	}
	taken, load := k.taken(mine, e)
	free := slices.DeleteFunc(slices.Clone(e.devices), func(d advertised) bool { return taken[d.ID] })
	if len(free) < count {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d, which is unexpected",
			resource, count, len(free))
	}
	slices.SortStableFunc(free, func(a, b advertised) int { return load[a.UUID] - load[b.UUID] })
	var got []allocatedDevice
	for _, d := range free[:count] {
		got = append(got, allocatedDevice{container: container, resource: resource, id: d.ID})
	}
	return got, nil
}

func (k *kubelet) taken(mine []allocatedDevice, e *endpoint) (taken map[string]bool, load map[string]int) {
	taken, load = map[string]bool{}, map[string]int{}
	for _, d := range mine {
		taken[d.id] = true
	}
	for _, state := range k.pods {
		for _, d := range state.devices {
			taken[d.id] = true
		}
	}
	for _, d := range e.devices {
		if taken[d.ID] {
			load[d.UUID]++
		}
	}
	return taken, load
}

// Allocations returns the IDs of the devices that the kubelet has allocated to each pod of the node, and the names of those that it has
// prepared for claims, by namespace/name.
func (k *kubelet) Allocations() map[string][]string {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[string][]string{}
	for _, state := range k.pods {
		name := state.pod.Namespace + "/" + state.pod.Name
		for _, d := range state.devices {
			all[name] = append(all[name], d.id)
		}
		for _, claim := range slices.Sorted(maps.Keys(state.claims)) {
			all[name] = append(all[name], state.claims[claim]...)
		}
	}
	return all
}
