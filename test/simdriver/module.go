// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// ErrModuleInUse is the error that a program has the driver open.
var ErrModuleInUse = errors.New("rmmod: ERROR: Module nvidia is in use")

// UnloadModule unloads the kernel module, as a driver upgrade does. That fails while any program has the driver open,
// and names one. With the module go all instances, the compute modes and, where a boot ends it, the MIG mode.
func (d *Driver) UnloadModule() error {
	return d.WithClients(func(s *State) error {
		if user := moduleUser(s); user != "" {
			return fmt.Errorf("%w by %s", ErrModuleInUse, user)
		}
		s.Node.Reload()
		s.Unloaded = true
		return nil
	})
}

// moduleUser names one of those that have the driver open.
func moduleUser(s *State) string {
	if s.Node.DRM {
		return "nvidia_drm"
	}
	for _, c := range s.Node.Clients {
		opens := func(g sim.GPU) bool { return c.Opens(g.UUID) }
		if c.Switches || len(c.Instances) > 0 || slices.ContainsFunc(s.Node.GPUs, opens) {
			return fmt.Sprintf("process %d (%s)", c.PID, c.Program)
		}
	}
	for _, g := range s.Node.GPUs {
		if len(g.Processes) > 0 {
			return fmt.Sprintf("process %d (%s)", g.Processes[0].PID, g.Processes[0].Name)
		}
	}
	return ""
}

// LoadModule loads the kernel module of a driver version. NVML of another version refuses to work with it.
func (d *Driver) LoadModule(version string) error {
	return d.Update(func(s *State) error {
		s.Node.DriverVersion, s.Unloaded = version, false
		return nil
	})
}
