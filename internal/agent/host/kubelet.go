// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
)

// ConfigVolumes tells what the kubelet has projected into the containers of a pod.
type ConfigVolumes interface {
	// Projected reports whether a volume of a pod with a ConfigMap has a key, so that its containers see it.
	Projected(podUID, key string) bool
}

// Kubelet looks into the folders that the kubelet keeps for pods. It goes into no container and no volume but those with
// ConfigMaps, which the kubelet writes itself: another file system that a tenant has mounted may answer to nobody, and a
// system call that waits for it ends with nothing, not even with its process.
type Kubelet struct {
	// Host is where the node's root is mounted, such as /host.
	Host string
	// Folder is the kubelet's on the node, such as /var/lib/kubelet.
	Folder string
}

// Projected implements ConfigVolumes.
func (k Kubelet) Projected(podUID, key string) bool {
	if !isName(podUID) || !isName(key) {
		return false
	}
	volumes, err := securejoin.SecureJoin(k.Host, filepath.Join(k.Folder, "pods", podUID, "volumes/kubernetes.io~configmap"))
	if err != nil {
		return false
	}
	entries, err := os.ReadDir(volumes)
	if err != nil {
		return false // there is no such pod, or it has none
	}
	for _, entry := range entries {
		if _, err := os.Stat(filepath.Join(volumes, entry.Name(), key)); err == nil {
			return true
		}
	}
	return false
}

// isName reports whether a name is that of an entry of a folder.
func isName(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsRune(name, filepath.Separator)
}

// deviceCheckpoint is where the kubelet records what it has allocated (kubernetes/kubernetes pkg/kubelet/cm/devicemanager/checkpoint).
const deviceCheckpoint = "device-plugins/kubelet_internal_checkpoint"

// podDevices are what the kubelet has recorded for a container.
type podDevices struct {
	PodUID, ContainerName string
	DeviceIDs             map[int64][]string // by NUMA node
}

// recorded is what the kubelet has allocated of device plugins: also to init containers, which its pod resources service
// leaves out, and to pods that have ended since its last allocation.
func (k Kubelet) recorded() ([]podDevices, error) {
	path, err := securejoin.SecureJoin(k.Host, filepath.Join(k.Folder, deviceCheckpoint))
	if err != nil {
		return nil, fmt.Errorf("finding the kubelet's checkpoint of devices: %w", err)
	}
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var checkpoint struct {
		Data struct{ PodDeviceEntries []podDevices }
	}
	if err == nil {
		err = json.Unmarshal(content, &checkpoint)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the kubelet's checkpoint of devices: %w", err)
	}
	return checkpoint.Data.PodDeviceEntries, nil
}

// Devices are what is recorded for each pod, by UID.
func (k Kubelet) Devices() (map[string][]string, error) {
	entries, err := k.recorded()
	devices := map[string][]string{}
	for _, entry := range entries {
		for _, ids := range entry.DeviceIDs {
			devices[entry.PodUID] = append(devices[entry.PodUID], ids...)
		}
	}
	return devices, err
}

// HeldDevice is a device of a device plugin that a container has.
type HeldDevice struct {
	ContainerName

	Device string
}

// Held are what is recorded for containers that run, or may be about to. One that has no known ID yet does as long as its pod runs.
func (k Kubelet) Held(processes *Proc, containers Containers) ([]HeldDevice, error) {
	entries, err := k.recorded()
	if err != nil || len(entries) == 0 {
		return nil, err
	}
	names, err := containers.Names()
	if err != nil {
		return nil, err //nolint:wrapcheck // says what it lists
	}
	running, err := processes.pods()
	if err != nil {
		return nil, err
	}
	var held []HeldDevice
	for _, entry := range entries {
		ids, name := running[entry.PodUID], names[entry.PodUID]
		name.Container = entry.ContainerName
		_, known := names[entry.PodUID+"/"+entry.ContainerName]
		if len(ids) == 0 || known && !slices.ContainsFunc(ids, func(id string) bool { return names[id] == name }) {
			continue
		}
		for _, devices := range entry.DeviceIDs {
			for _, id := range devices {
				held = append(held, HeldDevice{name, id})
			}
		}
	}
	return held, nil
}

// pods are the IDs of the containers of which processes run, by the UID of the pod.
func (p *Proc) pods() (map[string][]string, error) {
	pods := map[string][]string{}
	err := p.each(func(dir string, _ int) {
		cgroups, err := p.read(filepath.Join(dir, "cgroup"), maxStatus)
		if err != nil {
			return // it is gone
		}
		if pod, container := parseCgroups(string(cgroups)); pod != "" && !slices.Contains(pods[pod], container) {
			pods[pod] = append(pods[pod], container)
		}
	})
	return pods, err
}
