// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"slices"
	"strconv"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// injector makes happen what no program of the root does: processes on GPUs, faults, latencies and events.
type injector struct{ *store }

// AddProcess puts a process on a GPU: on a GPU instance, or on gpu.WholeGPU.
func (d injector) AddProcess(uuid string, p gpu.Process) error {
	return d.Update(func(s *State) error { return s.Node.AddProcess(uuid, p) })
}

// SetUse says how a process uses a GPU.
func (d injector) SetUse(uuid string, use gpu.ProcessUse) error {
	return d.Update(func(s *State) error { return s.Node.SetUse(uuid, use) })
}

// RemoveProcess ends a process on all GPUs.
func (d injector) RemoveProcess(pid int) error {
	return d.Update(func(s *State) error {
		s.remove(pid)
		return nil
	})
}

func (s *State) remove(pid int) {
	s.Node.RemoveProcess(pid)
	s.MPSClients = slices.DeleteFunc(s.MPSClients, func(c MPSClient) bool { return c.PID == pid })
}

// MPSServerName is the program whose processes hold the GPUs for MPS clients.
const MPSServerName = "nvidia-cuda-mps-server"

// UseMPS puts a client and its server on the GPUs with these minor numbers; none are all GPUs that are not in MIG mode.
// The server stays there when the client leaves.
func (d injector) UseMPS(pipeDirectory string, server, client int, minors []string) error {
	return d.Update(func(s *State) error {
		if !slices.Contains(s.MPSServers, MPSServer{PID: server, PipeDirectory: pipeDirectory}) {
			s.MPSServers = append(s.MPSServers, MPSServer{PID: server, PipeDirectory: pipeDirectory})
		}
		s.MPSClients = append(s.MPSClients, MPSClient{PID: client, ServerPID: server})
		for i := range s.Node.GPUs {
			g := &s.Node.GPUs[i]
			if g.MIG || len(minors) > 0 && !slices.Contains(minors, strconv.Itoa(i)) {
				continue
			}
			p := gpu.Process{PID: server, Name: MPSServerName, Instance: gpu.WholeGPU, MPSServer: true}
			if !slices.ContainsFunc(g.Processes, func(o gpu.Process) bool { return o.PID == server }) {
				if err := s.Node.AddProcess(g.UUID, p); err != nil {
					return err
				}
			}
			if err := s.Node.AddProcess(g.UUID, gpu.Process{PID: client, Instance: gpu.WholeGPU}); err != nil {
				return err
			}
		}
		return nil
	})
}

// EndMPSClient takes an MPS client off its GPUs.
func (d injector) EndMPSClient(pid int) error { return d.RemoveProcess(pid) }

// EndMPSServer takes an MPS server off its GPUs, and its clients.
func (d injector) EndMPSServer(pid int) error {
	return d.Update(func(s *State) error {
		for _, client := range s.ClientsOf(pid) {
			s.remove(client)
		}
		s.remove(pid)
		s.MPSServers = slices.DeleteFunc(s.MPSServers, func(m MPSServer) bool { return m.PID == pid })
		return nil
	})
}

// ServersOf lists the MPS servers of a pipe directory.
func (s *State) ServersOf(pipeDirectory string) []int {
	var pids []int
	for _, server := range s.MPSServers {
		if server.PipeDirectory == pipeDirectory {
			pids = append(pids, server.PID)
		}
	}
	return pids
}

// ClientsOf lists the MPS clients of a server.
func (s *State) ClientsOf(server int) []int {
	var pids []int
	for _, c := range s.MPSClients {
		if c.ServerPID == server {
			pids = append(pids, c.PID)
		}
	}
	return pids
}

// EndMPS ends the MPS servers of a pipe directory, and with them their clients.
func (d injector) EndMPS(pipeDirectory string) error {
	return d.Update(func(s *State) error {
		for _, server := range s.ServersOf(pipeDirectory) {
			for _, client := range s.ClientsOf(server) {
				s.remove(client)
			}
			s.remove(server)
		}
		s.MPSServers = slices.DeleteFunc(s.MPSServers, func(m MPSServer) bool { return m.PipeDirectory == pipeDirectory })
		return nil
	})
}

// AddFault makes calls fail or hang.
func (d injector) AddFault(f Fault) error {
	return d.Update(func(s *State) error {
		s.Faults = append(s.Faults, f)
		return nil
	})
}

// ClearFaults lets all calls succeed again. Calls that hang go on hanging.
func (d injector) ClearFaults() error {
	return d.Update(func(s *State) error {
		s.Faults = nil
		return nil
	})
}

// SetLatency says how long a call takes; "*" stands for all calls that are not named.
func (d injector) SetLatency(call string, latency time.Duration) error {
	return d.Update(func(s *State) error {
		if s.Latency == nil {
			s.Latency = map[string]time.Duration{}
		}
		s.Latency[call] = latency
		return nil
	})
}

// Raise tells an event to those who wait for it, such as an Xid error.
func (d injector) Raise(uuid string, kind, data uint64) error {
	return d.Update(func(s *State) error {
		serial := 1
		if len(s.Events) > 0 {
			serial = s.Events[len(s.Events)-1].Serial + 1
		}
		s.Events = append(s.Events, Event{Serial: serial, GPU: uuid, Type: kind, Data: data})
		return nil
	})
}

// Reboot boots the node anew: no process of it survives, though those of this machine that had NVML open do.
func (d *Driver) Reboot() error {
	return d.Update(func(s *State) error {
		s.Node.Reboot()
		s.MPSServers, s.MPSClients, s.Unloaded = nil, nil, false
		return nil
	})
}

// Node is the state of the hardware now.
func (d *Driver) Node() (*sim.Node, error) {
	s, err := d.Read()
	if err != nil {
		return nil, err
	}
	return s.Node.Clone(), nil
}
