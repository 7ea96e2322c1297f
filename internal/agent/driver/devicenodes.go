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
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// listTimeout bounds a run of nvidia-smi -L, which takes seconds for each GPU that nothing has open.
const listTimeout = time.Minute

// DeviceNodes keeps the device nodes of MIG instances in the driver's dev, and the CDI specification that lists them for
// NVIDIA's own pods. The kernel makes neither, and where CDI is on no component of NVIDIA's makes them but mig-manager.
type DeviceNodes struct {
	node   Node
	runner host.Runner
	cdi    string // folder of CDI specifications; empty: none
}

// NewDeviceNodes makes a keeper of a node's device nodes. Runner runs the driver's programs; cdi is the folder of CDI
// specifications, as this program sees it.
func NewDeviceNodes(node Node, runner host.Runner, cdi string) DeviceNodes {
	return DeviceNodes{node: node, runner: runner, cdi: cdi}
}

// Ensure makes the device nodes that instances lack, and then brings the CDI specification up to date. It changes
// nothing if both are as they must be.
func (n DeviceNodes) Ensure(ctx context.Context) error {
	d, err := n.node.Find()
	if err != nil {
		return err
	}
	wanted, err := d.capabilities()
	if err != nil {
		return err
	}
	if err := n.make(ctx, d, wanted); err != nil {
		return err
	}
	d.makeControlNodes()
	return errors.Join(d.refreshSpec(n.cdi), d.Show())
}

// make has the driver's own program make missing nodes, and makes those that are still missing.
func (n DeviceNodes) make(ctx context.Context, d Driver, wanted []capability) error {
	if len(d.without(wanted)) == 0 {
		return nil
	}
	listed := d.list(ctx, n.runner)
	var failed []string
	var errs []error
	for _, c := range d.without(wanted) {
		if err := d.makeCapability(c); err != nil {
			failed, errs = append(failed, c.path()), append(errs, err)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return fmt.Errorf("%d device nodes of MIG instances are missing in %s, such as %s, so pods on these instances cannot start: "+
		"run nvidia-smi -L in %s: %w", len(failed), d.Dev, failed[0], d.Dev, errors.Join(append(errs, listed)...))
}

// list runs nvidia-smi -L, which makes missing nodes of GPUs and of all instances, in its own dev.
func (d Driver) list(ctx context.Context, runner host.Runner) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	command, err := d.Inside("nvidia-smi", "-L")
	if err != nil {
		return err
	}
	_, err = runner.Run(ctx, command)
	return err
}

// capability is the right to use an instance. The kernel has one for each GPU instance and each compute instance that
// exists, and gives it to programs that can open its device node.
type capability struct {
	minor  uint32
	mode   fs.FileMode
	modify bool // the node may be made by others than the driver
}

func (c capability) path() string { return fmt.Sprintf("/dev/%s/nvidia-cap%d", capsFolder, c.minor) }

// capabilities are those of all instances that exist now, by minor number. None where the kernel shows none: then there
// is nothing to check.
func (d Driver) capabilities() ([]capability, error) {
	var all []capability
	for _, pattern := range []string{"gpu*/mig/gi*/access", "gpu*/mig/gi*/ci*/access"} {
		files, err := filepath.Glob(filepath.Join(d.proc(), "driver/nvidia/capabilities", pattern))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if errors.Is(err, fs.ErrNotExist) { // its instance is gone meanwhile
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("reading the capabilities of MIG instances: %w", err)
			}
			c, err := parseCapability(string(content))
			if err != nil {
				return nil, fmt.Errorf("reading %s: %w", file, err)
			}
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b capability) int { return int(a.minor) - int(b.minor) })
	return all, nil
}

func parseCapability(content string) (capability, error) {
	values := map[string]uint64{}
	for line := range strings.Lines(content) {
		name, value, _ := strings.Cut(line, ":")
		number, err := strconv.ParseUint(strings.TrimSpace(value), 10, 32)
		if err != nil {
			return capability{}, fmt.Errorf("no number in %q: %w", strings.TrimSpace(line), err)
		}
		values[strings.TrimSpace(name)] = number
	}
	minor, ok := values["DeviceFileMinor"]
	if !ok {
		return capability{}, errors.New("no DeviceFileMinor")
	}
	return capability{
		minor: uint32(minor), mode: fs.FileMode(values["DeviceFileMode"]).Perm(), modify: values["DeviceFileModify"] == 1,
	}, nil
}

// without are the capabilities that have no device node, or one with numbers of an earlier driver.
func (d Driver) without(wanted []capability) []capability {
	major, known := d.major("nvidia-caps")
	return slices.DeleteFunc(slices.Clone(wanted), func(c capability) bool {
		device, ok := host.DeviceAt(d.here(c.path()))
		return ok && device.Minor == c.minor && (!known || device.Major == major)
	})
}

func (d Driver) makeCapability(c capability) error {
	major, known := d.major("nvidia-caps")
	switch {
	case !c.modify:
		return fmt.Errorf("%s: the driver forbids others to make it (DeviceFileModify is 0)", c.path())
	case !known:
		return fmt.Errorf("%s: the kernel lists no nvidia-caps in /proc/devices: load the kernel module nvidia", c.path())
	}
	return host.MakeDevice(d.here(c.path()), host.Device{Major: major, Minor: c.minor, Mode: c.mode})
}

// makeControlNodes makes those nodes that programs need beside those of GPUs, as NVIDIA's mig-manager does. None of
// them is needed by every program, so one that cannot be made is no failure.
func (d Driver) makeControlNodes() {
	for _, control := range []struct {
		name, driver string
		minor        uint32
	}{
		{"nvidiactl", "nvidia", 255},
		{"nvidia-modeset", "nvidia", 254},
		{"nvidia-uvm", "nvidia-uvm", 0},
		{"nvidia-uvm-tools", "nvidia-uvm", 1},
	} {
		path := d.here(filepath.Join("/dev", control.name))
		if _, there := host.DeviceAt(path); there {
			continue
		}
		if major, known := d.major(control.driver); known {
			_ = host.MakeDevice(path, host.Device{Major: major, Minor: control.minor, Mode: 0o666}) // see above
		}
	}
}

// here is the path here of a path in the root that has the driver's device nodes.
func (d Driver) here(path string) string { return d.node.path(filepath.Join(d.Dev, path)) }

// proc is a proc file system that shows the driver: that of the root with the device nodes, or the node's.
func (d Driver) proc() string {
	proc := d.here("/proc")
	if _, err := os.Stat(filepath.Join(proc, "driver/nvidia")); err == nil {
		return proc
	}
	return d.node.path("/proc")
}

// major is the major number of a character device driver, by the name in /proc/devices.
func (d Driver) major(name string) (uint32, bool) {
	content, err := os.ReadFile(filepath.Join(d.proc(), "devices"))
	if err != nil {
		return 0, false
	}
	characters, _, _ := strings.Cut(string(content), "Block devices:")
	for line := range strings.Lines(characters) {
		fields := strings.Fields(line)
		if len(fields) != 2 || fields[1] != name {
			continue
		}
		major, err := strconv.ParseUint(fields[0], 10, 32)
		return uint32(major), err == nil
	}
	return 0, false
}
