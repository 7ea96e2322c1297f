// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

const capsFolder = "nvidia-caps"

// Prepare makes the driver usable by this container. Where the driver's dev has no node yet, as after a boot of a node
// without nvidia-persistenced, the driver's own program makes them; if it cannot, NVML says why better than that
// program.
func (d Driver) Prepare(ctx context.Context, runner host.Runner) error {
	if d.node.Container == "" {
		return nil
	}
	if _, there := host.DeviceAt(d.here("/dev/nvidiactl")); !there {
		_ = d.list(ctx, runner) // see above
	}
	return d.Show()
}

// Show shows this container the driver's device nodes and sockets, which lie in the driver's own dev and run. What was
// shown of an earlier driver is replaced.
func (d Driver) Show() error {
	if d.node.Container == "" {
		return nil
	}
	return errors.Join(d.showDevices(), d.showSockets())
}

// showDevices copies the device nodes, since a bind mount of the folder would end with the driver's file system.
func (d Driver) showDevices() error {
	from, to := d.node.path(filepath.Join(d.Dev, "dev")), filepath.Join(d.node.Container, "dev")
	nodes, err := deviceNodes(from)
	if err != nil {
		return err
	}
	var errs []error
	for name, device := range nodes {
		errs = append(errs, host.MakeDevice(filepath.Join(to, name), device))
	}
	return errors.Join(errs...)
}

// showSockets links the folders of the sockets by which NVML reaches nvidia-persistenced and the fabric manager.
func (d Driver) showSockets() error {
	var errs []error
	for _, folder := range []string{"nvidia-persistenced", "nvidia-fabricmanager"} {
		errs = append(errs, host.Link(d.runFolder(folder), filepath.Join(d.node.Container, "run", folder)))
	}
	return errors.Join(errs...)
}

// runFolder is the path here of a folder below the driver's run, or below the run of the root of the device nodes if
// only that has it.
func (d Driver) runFolder(name string) string {
	own, other := d.node.path(filepath.Join(d.Driver, "run", name)), d.node.path(filepath.Join(d.Dev, "run", name))
	if _, err := os.Stat(own); err == nil {
		return own
	}
	if _, err := os.Stat(other); err == nil {
		return other
	}
	return own
}

// deviceNodes are the driver's device nodes below a folder such as /dev, by their path in it.
func deviceNodes(dev string) (map[string]host.Device, error) {
	nodes := map[string]host.Device{}
	for _, folder := range []string{"", capsFolder} {
		entries, err := os.ReadDir(filepath.Join(dev, folder))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("looking for the driver's device nodes: %w", err)
		}
		for _, entry := range entries {
			name := filepath.Join(folder, entry.Name())
			if device, ok := host.DeviceAt(filepath.Join(dev, name)); ok && strings.HasPrefix(entry.Name(), "nvidia") {
				nodes[name] = device
			}
		}
	}
	return nodes, nil
}
