// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"path/filepath"
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
