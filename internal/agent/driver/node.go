// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package driver finds NVIDIA's driver on the node, in a container or on the host, whenever it comes, goes or is
// replaced, and keeps what the driver needs around it: it runs the driver's programs in the driver's own root, shows
// this container the driver's device nodes and sockets, and keeps the device nodes of MIG instances, and the CDI
// specification that lists them, where NVIDIA's container toolkit and device plugin look.
//
// Nothing is remembered: every use looks for the driver anew, since the GPU Operator replaces the driver's root under
// running pods. A path of the driver is valid for one use only.
package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

const libraryName = "libnvidia-ml.so.1"

// libraryFolders is where drivers put their libraries, below the driver root. Debian's come last in their pair: the
// links that lead there are followed inside the root.
func libraryFolders() []string {
	return []string{
		"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu/nvidia/current",
		"usr/lib/aarch64-linux-gnu/nvidia/current", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib", "lib",
		"usr/local/nvidia/lib64", "lib/nvidia",
	}
}

// programFolders is where drivers put their programs, below the driver root.
func programFolders() []string {
	return []string{"usr/bin", "usr/sbin", "bin", "sbin", "opt/bin", "usr/local/nvidia/bin"}
}

// Node is a node's file system as this program sees it.
type Node struct {
	// Host is where the node's root is mounted: "/host" in a container, "/" on the node itself.
	Host string
	// Root is the driver root on the node, or Auto.
	Root string
	// Container is the root of the container that this program runs in. The driver's device nodes and sockets are shown
	// there. Empty: this program runs on the node itself, which must not be changed.
	Container string
}

// Find finds the driver. The error is a Missing if there is none.
func (n Node) Find() (Driver, error) {
	m, err := n.marks()
	if err != nil {
		return Driver{}, err
	}
	roots, err := locate(n.Root, m, n.look)
	if err != nil {
		return Driver{}, err
	}
	d := Driver{node: n, Roots: roots}
	if d.Library, err = n.Library(roots.Driver); err != nil {
		return Driver{}, err
	}
	if d.Identity, err = d.identify(); err != nil {
		return Driver{}, missing(NotReady, "Waiting for NVIDIA's driver: it is being replaced: %v", err)
	}
	return d, nil
}

// Leaving reports whether the GPU Operator is about to replace the driver: k8s-driver-manager stops the validator
// together with the device plugin, and the validator's preStop hook removes its mark (NVIDIA/gpu-operator
// assets/state-operator-validation/0500_daemonset.yaml). Without the validator nobody tells; one that is deleted while
// its init containers run has no hook, and the mark stays.
func (n Node) Leaving() bool {
	m, err := n.marks()
	return err == nil && m.operator && m.ready == nil
}

// ContainerReady reports whether the container of NVIDIA's driver is ready. The container's startup probe makes the
// file; when its pod is deleted, the preStop hook removes it before the driver is told to end (NVIDIA/gpu-operator
// assets/state-driver). So it is the first sign of a replacement, at least 30 seconds before the module is unloaded,
// unless nothing has the driver open. False for a driver on the host, and for a driver container that is not the GPU
// Operator's.
func (n Node) ContainerReady() bool {
	_, err := os.Stat(n.path(containerReadyMark))
	return err == nil
}

// Version returns the version of the driver that is ready. Empty: there is none, its files do not tell, or the kernel
// still has the module of another version, as after an update of a host's packages until the next reboot.
func (n Node) Version() string {
	d, err := n.Find()
	if err != nil {
		return ""
	}
	_, version, _ := strings.Cut(filepath.Base(d.Library), ".so.")
	loaded, err := os.ReadFile(n.path("/sys/module/nvidia/version"))
	if err == nil && strings.TrimSpace(string(loaded)) != version {
		return ""
	}
	return version
}

// installed finds the driver as far as its programs are there, ready or not.
func (n Node) installed() (Driver, error) {
	roots, err := locate(n.Root, marks{}, n.look)
	return Driver{node: n, Roots: roots}, err
}

func (n Node) marks() (marks, error) {
	var m marks
	m.operator = n.isFolder(validations)
	_, err := os.Stat(n.path("/etc/nv_tegra_release"))
	m.tegra = err == nil
	content, err := os.ReadFile(n.path(readyMark))
	switch {
	case err == nil:
		text := string(content)
		m.ready = &text
	case !errors.Is(err, fs.ErrNotExist):
		return m, fmt.Errorf("looking for NVIDIA's driver: %w", err)
	}
	return m, nil
}

func (n Node) look(root string) tree {
	_, err := n.Library(root)
	_, wsl := n.file(root, "usr/lib/wsl/lib/"+libraryName)
	return tree{library: err == nil, wsl: wsl, dev: n.isFolder(filepath.Join(root, "dev"))}
}

// Library returns the path here of NVML below a driver root on the node, links followed.
func (n Node) Library(root string) (string, error) {
	for _, folder := range libraryFolders() {
		if file, ok := n.file(root, filepath.Join(folder, libraryName)); ok {
			return file, nil
		}
	}
	return "", missing(NotReady, "Waiting for NVIDIA's driver: no %s below %s", libraryName, root)
}

// file is the path here of a regular file below a root on the node.
func (n Node) file(root, name string) (path string, ok bool) {
	path, err := securejoin.SecureJoin(n.path(root), name)
	if err != nil {
		return "", false
	}
	info, err := os.Stat(path)
	return path, err == nil && info.Mode().IsRegular()
}

func (n Node) isFolder(path string) bool {
	info, err := os.Stat(n.path(path))
	return err == nil && info.IsDir()
}

// path is the path here of a path on the node. Links are followed on the node, also absolute ones: Debian's lead from
// /usr to /etc/alternatives.
func (n Node) path(onNode string) string {
	path, err := securejoin.SecureJoin(n.Host, onNode)
	if err != nil { // a loop of links: what is at their end is not there
		return filepath.Join(n.Host, onNode)
	}
	return path
}

// Identity tells one installation of the driver from another, also at the same path.
type Identity struct{ Root, Library host.FileID }
