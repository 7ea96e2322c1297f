// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

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
	free := slices.DeleteFunc(slices.Clone(e.devices), func(d nvidia.Advertised) bool { return taken[d.ID] })
	if len(free) < count {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d, which is unexpected",
			resource, count, len(free))
	}
	slices.SortStableFunc(free, func(a, b nvidia.Advertised) int { return load[a.UUID] - load[b.UUID] })
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
