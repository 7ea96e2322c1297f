// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// SimulatedCgroups are folders in place of cgroups, and programs that the rules of package sim play in them.
type SimulatedCgroups struct {
	Folder string
	Node   func(change func(*sim.Node) error) error
	// See is the memory of a GPU as a program sees it.
	See func(gpu string, pid int) (*gpu.Memory, error)
}

// NewSimulatedCgroups gives a node an empty hierarchy and a back end.
func NewSimulatedCgroups(t *testing.T, b sim.Backend, node func(change func(*sim.Node) error) error) SimulatedCgroups {
	t.Helper()
	c := SimulatedCgroups{Folder: t.TempDir(), Node: node}
	c.See = func(uuid string, pid int) (seen *gpu.Memory, err error) {
		err = node(func(n *sim.Node) error { seen, err = n.MemoryFor(uuid, pid); return err })
		return seen, err
	}
	NewWithT(t).Expect(node(func(n *sim.Node) error {
		n.Cgroups = sim.Cgroups{Backend: b, Root: c.Folder}
		return nil
	})).To(Succeed())
	return c
}

func (c SimulatedCgroups) node(t *testing.T) (now *sim.Node) {
	t.Helper()
	NewWithT(t).Expect(c.Node(func(n *sim.Node) error { now = n.Clone(); return nil })).To(Succeed())
	return now
}

// Simulated implements MemoryLimits.
func (SimulatedCgroups) Simulated() bool { return true }

// Root implements LimitedCgroups.
func (c SimulatedCgroups) Root() string { return c.Folder }

// Backend implements MemoryLimits.
func (c SimulatedCgroups) Backend() (b sim.Backend) {
	_ = c.Node(func(n *sim.Node) error { b = n.Cgroups.Backend; return nil })
	return b
}

// GPUs implements MemoryLimits.
func (c SimulatedCgroups) GPUs() (uuids []string) {
	_ = c.Node(func(n *sim.Node) error {
		for _, g := range n.GPUs {
			uuids = append(uuids, g.UUID)
		}
		return nil
	})
	return uuids
}

// MIGInstance implements MemoryLimits.
func (c SimulatedCgroups) MIGInstance(t *testing.T) string {
	t.Helper()
	NewWithT(t).Expect(c.Node(func(n *sim.Node) error {
		g := &n.GPUs[0]
		g.MIG, g.PendingMIG = true, true
		p := g.Spec().Profiles[0]
		i, err := n.CreateGPUInstance(g.UUID, p.ID, nil)
		if err == nil {
			_, err = n.CreateComputeInstance(g.UUID, i.ID, p.Slices)
		}
		return err
	})).To(Succeed())
	return c.node(t).GPUs[0].Instances[0].Compute[0].UUID
}

// Cgroup implements LimitedCgroups.
func (c SimulatedCgroups) Cgroup(t *testing.T, parent string, delegated bool) string {
	t.Helper()
	if parent == "" {
		parent = c.Folder
	}
	path, err := os.MkdirTemp(parent, "cgroup-") //nolint:usetesting // it lies below its parent
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	if delegated {
		c.delegate(t, path)
	}
	return path
}

func (c SimulatedCgroups) delegate(t *testing.T, path string) {
	t.Helper()
	NewWithT(t).Expect(os.WriteFile(filepath.Join(path, string(c.Backend())+".max"), nil, 0o600)).To(Succeed())
}

// Remove implements LimitedCgroups.
func (SimulatedCgroups) Remove(t *testing.T, cgroup string) {
	t.Helper()
	NewWithT(t).Expect(os.RemoveAll(cgroup)).To(Succeed())
}

// Remake implements LimitedCgroups.
func (c SimulatedCgroups) Remake(t *testing.T, cgroup string) {
	t.Helper()
	NewWithT(t).Expect(os.Mkdir(cgroup, 0o700)).To(Succeed())
	c.delegate(t, cgroup)
}

// simulatedProgram is a program that the rules play.
type simulatedProgram struct {
	SimulatedCgroups
	t   *testing.T
	gpu string
	pid int
}

// Program implements MemoryLimits.
func (c SimulatedCgroups) Program(t *testing.T, uuid, cgroup string) LimitedProgram {
	t.Helper()
	p := simulatedProgram{c, t, uuid, 0}
	NewWithT(t).Expect(c.Node(func(n *sim.Node) error {
		n.Serial++
		p.pid = 910000 + n.Serial
		return n.StartProgram(uuid, gpu.Process{PID: p.pid, Name: "python3", Instance: gpu.WholeGPU}, cgroup)
	})).To(Succeed())
	t.Cleanup(p.End)
	return p
}

// said is an error of the rules as CUDA names it.
func said(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func (p simulatedProgram) Allocate(kind sim.MemoryKind, bytes uint64) string {
	return said(p.Node(func(n *sim.Node) error { return n.Allocate(p.gpu, p.pid, kind, bytes) }))
}

func (p simulatedProgram) Free() {
	_ = p.Node(func(n *sim.Node) error { n.FreeMemory(p.pid); return nil })
}

func (p simulatedProgram) End() {
	_ = p.Node(func(n *sim.Node) error { n.RemoveProcess(p.pid); return nil })
}

func (p simulatedProgram) Export(bytes uint64) string {
	NewWithT(p.t).Expect(p.Allocate(sim.DeviceMemory, bytes)).To(BeEmpty())
	return strconv.FormatUint(bytes, 10)
}

func (p simulatedProgram) Import(exported string) string {
	bytes, err := strconv.ParseUint(exported, 10, 64)
	return said(err) + p.Allocate(sim.ImportedMemory, bytes)
}

func (p simulatedProgram) Memory() (total, free uint64) {
	seen, err := p.See(p.gpu, p.pid)
	NewWithT(p.t).Expect(err).NotTo(HaveOccurred())
	return uint64(seen.Total), uint64(seen.Free)
}
