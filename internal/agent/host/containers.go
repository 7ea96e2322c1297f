// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
)

// ContainerName is a container as Kubernetes names it.
type ContainerName struct{ Namespace, Pod, Container string }

// Containers names the containers of the node.
type Containers interface {
	// Names are the containers by the ID that the container runtime gives them, also those that have ended a while ago,
	// and the pods by their UID, without a container, for those whose ID is not known.
	Names() (map[string]ContainerName, error)
}

// NoContainers is for where the names are not known.
type NoContainers struct{}

// Names implements Containers.
func (NoContainers) Names() (map[string]ContainerName, error) { return nil, nil }

// ContainerLogs knows the names of containers by the names of their logs, of which it reads none.
type ContainerLogs struct{ root *os.Root }

var _ Containers = (*ContainerLogs)(nil)

// NewContainerLogs looks below the root of the node's file system.
func NewContainerLogs(root *os.Root) *ContainerLogs { return &ContainerLogs{root: root} }

// containerLogs is the folder in which the kubelet makes a link to the log of each container, for programs that collect
// logs.
const containerLogs = "var/log/containers"

// containerLog is such a link: <pod>_<namespace>_<container>-<id>.log (kubernetes/kubernetes
// pkg/kubelet/kuberuntime/legacy.go).
var containerLog = regexp.MustCompile(`^([^_]+)_([^_]+)_([^_]+)-([0-9a-f]{64})\.log$`)

// podLogs is where such a link leads: …/<namespace>_<pod>_<uid>/<container>/<number>.log. The kubelet cuts the name of
// the link after 251 characters, and with it the ID of a container whose pod has a long name, but not this.
var podLogs = regexp.MustCompile(`/([^_/]+)_([^_/]+)_([^_/]+)/[^/]+/[^/]+$`)

// Names implements Containers.
func (l *ContainerLogs) Names() (map[string]ContainerName, error) {
	links, err := fs.ReadDir(l.root.FS(), containerLogs)
	if errors.Is(err, fs.ErrNotExist) { // no container has run yet
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the logs of containers: %w", err)
	}
	names := make(map[string]ContainerName, 2*len(links))
	for _, link := range links {
		target, _ := l.root.Readlink(containerLogs + "/" + link.Name()) // one that is gone leads nowhere
		if m := podLogs.FindStringSubmatch(target); m != nil {
			names[m[3]] = ContainerName{Namespace: m[1], Pod: m[2]}
		}
		if m := containerLog.FindStringSubmatch(link.Name()); m != nil {
			names[m[4]] = ContainerName{Pod: m[1], Namespace: m[2], Container: m[3]}
		}
	}
	return names, nil
}
