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
	// Names are the containers by the ID that the container runtime gives them and by <UID of the pod>/<name>, also those
	// that have ended a while ago, and the pods by their UID, without a container, for those whose ID is not known.
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
var podLogs = regexp.MustCompile(`/([^_/]+)_([^_/]+)_([^_/]+)/([^/]+)/[^/]+$`)

// Names implements Containers.
func (l *ContainerLogs) Names() (map[string]ContainerName, error) {
	names, err := l.Pods()
	if err != nil {
		return nil, err
	}
	links, err := fs.ReadDir(l.root.FS(), containerLogs)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // no container has run yet
		return nil, fmt.Errorf("listing the logs of containers: %w", err)
	}
	for _, link := range links {
		target, _ := l.root.Readlink(containerLogs + "/" + link.Name()) // one that is gone leads nowhere
		pod, id := podLogs.FindStringSubmatch(target), containerLog.FindStringSubmatch(link.Name())
		if pod != nil {
			names[pod[3]] = ContainerName{Namespace: pod[1], Pod: pod[2]}
		}
		if id != nil {
			names[id[4]] = ContainerName{Pod: id[1], Namespace: id[2], Container: id[3]}
		}
		if pod != nil && id != nil {
			names[pod[3]+"/"+pod[4]] = names[id[4]]
		}
	}
	return names, nil
}
