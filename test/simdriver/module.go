// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import "fmt"

// UnloadModule unloads the kernel module, as a driver upgrade does. That fails while any program has the driver open, and
// names one. With the module go all instances, the compute modes and, where a boot ends it, the MIG mode.
func (d *Driver) UnloadModule() error {
	return d.WithClients(func(s *State) error {
		if len(s.Node.Clients) > 0 {
			return fmt.Errorf("rmmod: ERROR: Module nvidia is in use by process %d", s.Node.Clients[0].PID)
		}
		for _, g := range s.Node.GPUs {
			if len(g.Processes) > 0 {
				return fmt.Errorf("rmmod: ERROR: Module nvidia is in use by process %d (%s)", g.Processes[0].PID, g.Processes[0].Name)
			}
		}
		s.Node.Reload()
		s.TimeSlices, s.Unloaded = nil, true
		return nil
	})
}

// LoadModule loads the kernel module of a driver version. NVML of another version refuses to work with it.
func (d *Driver) LoadModule(version string) error {
	return d.Update(func(s *State) error {
		s.Node.DriverVersion, s.Unloaded = version, false
		return nil
	})
}
