// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"path/filepath"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// Driver is the driver that a look at the node found. It is valid until the driver is replaced.
type Driver struct {
	Roots

	Library  string // path here of NVML, links followed
	Identity Identity

	node Node
}

func (d Driver) identify() (Identity, error) {
	root, err := host.IDOf(d.node.path(d.Driver))
	if err != nil {
		return Identity{}, err
	}
	library, err := host.IDOf(d.Library)
	return Identity{Root: root, Library: library}, err
}

// Inside is a command that runs one of the driver's programs in the root that has the driver's device nodes and
// sockets, as NVIDIA's own components run it. A user who may not change the root runs it as Outside does.
func (d Driver) Inside(program string, args ...string) (host.Command, error) {
	root := d.node.path(d.Dev)
	if !host.CanChangeRoot() {
		return d.Outside(program, args...)
	}
	file, err := d.program(program)
	if err != nil {
		return host.Command{}, err
	}
	path, below := strings.CutPrefix(file, strings.TrimSuffix(root, "/")+"/")
	if !below {
		return host.Command{}, missing(NotReady, "%s lies outside of %s, the root of the device nodes: install the driver below it", file, d.Dev)
	}
	c := host.Command{Root: root, Path: "/" + path, Args: args, Env: []string{"PATH=/usr/bin:/usr/sbin:/bin:/sbin"}}
	if d.Dev != d.Driver { // the driver's libraries are not where the loader of this root looks
		inside, err := filepath.Rel(root, d.node.path(d.Driver))
		if err != nil {
			return host.Command{}, err
		}
		c.Env = environment("/" + inside)
	}
	return c, nil
}

// Outside is a command that runs one of the driver's programs in this container, with an environment in which it finds
// the driver's libraries and the driver's other programs.
func (d Driver) Outside(program string, args ...string) (host.Command, error) {
	file, err := d.program(program)
	if err != nil {
		return host.Command{}, err
	}
	c := host.Command{Path: file, Args: args}
	if root := d.node.path(d.Driver); filepath.Clean(root) != "/" {
		c.Env = environment(root)
	}
	return c, nil
}

// program is the path here of one of the driver's programs, links followed.
func (d Driver) program(name string) (string, error) {
	for _, folder := range programFolders() {
		if file, ok := d.node.file(d.Driver, filepath.Join(folder, name)); ok {
			return file, nil
		}
	}
	return "", missing(NotReady, "The driver in %s has no %s (looked in %s): install the driver's programs",
		d.Driver, name, strings.Join(programFolders(), ", "))
}

// environment is in which a program finds a driver below another root. The C library is looked for in the own file
// system first: a driver root may hold one of another version, and a program whose loader and C library differ does not
// start.
func environment(root string) []string {
	libraries := []string{
		"/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
	}
	for _, folder := range libraryFolders() {
		libraries = append(libraries, filepath.Join(root, folder))
	}
	programs := make([]string, 0, len(programFolders())+2)
	for _, folder := range programFolders() {
		programs = append(programs, filepath.Join(root, folder))
	}
	programs = append(programs, "/usr/bin", "/bin")
	return []string{"LD_LIBRARY_PATH=" + strings.Join(libraries, ":"), "PATH=" + strings.Join(programs, ":")}
}
