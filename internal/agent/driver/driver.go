// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
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

// Runner runs the driver's programs in this container, from wherever the driver is when they are run. The path of a
// command counts by its last element only. A daemon that is started has the driver's device nodes, and needs a driver
// that is ready. A program that speaks with a daemon renews these nodes, since a reload of the kernel module may change
// their numbers. It runs also while the driver is being replaced, so that the daemon can be ended then.
type Runner struct {
	node Node
	next host.Runner
}

// NewRunner makes a Runner of programs of the node's driver.
func NewRunner(node Node, next host.Runner) Runner { return Runner{node: node, next: next} }

// Run implements host.Runner.
func (r Runner) Run(ctx context.Context, c host.Command) (string, error) {
	d, err := r.node.Find()
	if err == nil {
		if failed := d.Show(); c.Daemon { // others do not need the nodes themselves
			err = failed
		}
	} else if !c.Daemon && r.node.Leaving() {
		d, err = r.node.installed()
	}
	if err != nil {
		return "", err
	}
	found, err := d.Outside(filepath.Base(c.Path))
	if err != nil {
		return "", err
	}
	c.Path, c.Env = found.Path, append(found.Env, c.Env...)
	return r.next.Run(ctx, c)
}
