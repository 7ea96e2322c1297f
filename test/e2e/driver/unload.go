// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// Holder is a process that has the driver open.
type Holder struct {
	PID     int
	Program string
	PodUID  string // empty outside pods
}

// InUse is the error that the kernel module stays loaded because processes have the driver open.
type InUse struct {
	Holders []Holder
	err     error
}

func (e *InUse) Error() string {
	var names []string
	for _, h := range e.Holders {
		names = append(names, fmt.Sprintf("%s (process %d, pod %s)", h.Program, h.PID, h.PodUID))
	}
	return fmt.Sprintf("%v; processes with the driver open: %s", e.err, strings.Join(names, ", "))
}

func (e *InUse) Unwrap() error { return e.err }

// PreStop is what happens first when the pod of the driver is deleted: its hook says that the container is not ready
// any more. A container that restarts in its pod has no such hook.
func (d *Driver) PreStop() error { return remove(containerReady) }

// Shutdown ends the driver as the driver container does when it is told to end: the daemons end, then the module is
// unloaded and the mount removed. If a process has the driver open, module and mount stay. The file driver-ready stays
// too: the GPU Operator's validator removes it when its own pod ends.
func (d *Driver) Shutdown() (unloaded bool, err error) {
	if err := d.stopDaemons(); err != nil {
		return false, err
	}
	err = d.Unload()
	if _, inUse := errors.AsType[*InUse](err); inUse {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, d.Unmount()
}

// Unload unloads the kernel module. While a process has the driver open it fails with *InUse.
func (d *Driver) Unload() error {
	hardware, err := simdriver.Open(machineRoot)
	if err != nil {
		return err
	}
	found, err := holders(hardware)
	if err != nil {
		return err
	}
	err = hardware.UnloadModule()
	if errors.Is(err, simdriver.ErrModuleInUse) {
		return &InUse{Holders: found, err: err}
	}
	return err
}

// Unmount removes the mount of the driver container, which all processes lose that do not have its files open.
func (d *Driver) Unmount() error {
	errs := []error{unmountAll(Root)}
	if d.own != "" {
		errs = append(errs, unmountAll(d.own))
	}
	return errors.Join(errs...)
}

// Restart restarts the driver container in its pod: no other component is told, and the module and driver-ready stay
// while a process has the driver open.
func (d *Driver) Restart() (*Driver, error) {
	if _, err := d.Shutdown(); err != nil {
		return nil, err
	}
	if err := d.Unmount(); err != nil {
		return nil, err
	}
	return Start(d.Options)
}

// Invalidate removes the files by which the GPU Operator's validator says that driver and toolkit are ready, as the
// preStop hook of its pod does.
func Invalidate() error { return errors.Join(remove(driverReady), remove(toolkitReady)) }

// holders lists the processes of the machine that have the driver open, those of MPS servers and their clients
// included.
func holders(hardware *simdriver.Driver) ([]Holder, error) {
	root, err := os.OpenRoot("/proc")
	if err != nil {
		return nil, fmt.Errorf("opening /proc: %w", err)
	}
	defer root.Close() //nolint:errcheck // only read
	proc := host.NewProc(root)
	pids, err := withFilesOpen(hardware)
	if err != nil {
		return nil, err
	}
	n, err := hardware.Node()
	if err != nil {
		return nil, err
	}
	for _, g := range n.GPUs {
		for _, p := range g.Processes {
			pids = append(pids, p.PID)
		}
	}
	slices.Sort(pids)
	var found []Holder
	for _, pid := range slices.Compact(pids) {
		p := proc.Describe(pid)
		found = append(found, Holder{PID: pid, Program: p.Name, PodUID: p.PodUID})
	}
	return found, nil
}

// withFilesOpen lists the processes that keep a file open by which the simulated driver knows its clients. The path of
// an open file says nothing once the driver's root is unmounted.
func withFilesOpen(hardware *simdriver.Driver) ([]int, error) {
	marks, err := hardware.Marks()
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, file := range files {
		info, err := os.Stat(file)
		if err != nil || !slices.ContainsFunc(marks, func(mark os.FileInfo) bool { return os.SameFile(mark, info) }) {
			continue // it may have been closed
		}
		pid, err := strconv.Atoi(strings.Split(file, "/")[2])
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
