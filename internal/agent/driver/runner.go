// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"path/filepath"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

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
