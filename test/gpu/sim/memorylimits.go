// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"errors"
	"math"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Backend is what the kernel module charges the GPU memory of cgroups with. It picks one when it is loaded: dmem, a
// controller of Linux 6.14 and later, else misc, a table of its own, else none.
type Backend string

// The back ends.
const (
	NoBackend Backend = "none"
	Dmem      Backend = "dmem"
	Misc      Backend = "misc"
)

// NoLimit is the hard limit that is none (NVML_DEVICE_MEMORY_LIMIT_MAX).
const NoLimit = uint64(math.MaxUint64)

// MemoryLimit is what NVML says of a cgroup on a GPU, in bytes.
type MemoryLimit struct{ Soft, Hard, Used uint64 }

// MemoryKind is how a program takes memory.
type MemoryKind string

// The kinds. The first three are charged; imported is memory that another program has taken.
const (
	DeviceMemory   MemoryKind = "device memory"
	PoolMemory     MemoryKind = "memory of an asynchronous pool"
	VirtualMemory  MemoryKind = "memory of virtual addresses"
	ManagedMemory  MemoryKind = "managed memory"
	ImportedMemory MemoryKind = "imported memory"
	contextMemory  MemoryKind = "context"
)

func (k MemoryKind) charged() bool { return k != ManagedMemory && k != ImportedMemory }

// ErrOutOfMemory is CUDA's error.
var ErrOutOfMemory = errors.New("CUDA_ERROR_OUT_OF_MEMORY")

// CgroupLimit is a limit that the driver keeps, in bytes.
type CgroupLimit struct {
	Cgroup     string // identity of its directory
	Path       string // at which that was; empty: removed, and the limit is stale
	Soft, Hard uint64
}

// Allocation is memory that a process has taken.
type Allocation struct {
	PID     int
	Kind    MemoryKind
	Bytes   uint64
	Cgroups []string `json:",omitempty"` // that are charged: on dmem the process's and its ancestors, on misc the one with the limit
}

// SetMemoryLimit is nvmlDeviceSetMemoryLimits_v1, called by root or another user.
func (n *Node) SetMemoryLimit(uuid, path string, soft, hard uint64, root bool) error {
	if !root {
		return refuse(NoPermission, "only root sets limits")
	}
	n.sweep()
	g, chain, err := n.limitable(uuid, path)
	total := uint64(0)
	if g != nil {
		total = uint64(g.Spec().MemoryMiB) << 20
	}
	switch {
	case err != nil:
		return err
	case soft > hard, soft > total, hard > total && hard != NoLimit:
		return refuse(InvalidArgument, "soft %d, hard %d, the GPU has %d", soft, hard, total)
	case n.Cgroups.Backend == Misc:
		return g.setMisc(chain[0], soft, hard)
	case !chain[0].files:
		return refuse(NotFound, "%s has no dmem files", path)
	}
	n.setDmem(g, chain, soft, hard)
	return nil
}

// setDmem sets dmem.min and dmem.max. A maximum below use is kept as it was, in silence. Soft raises that of the
// ancestors.
func (n *Node) setDmem(g *GPU, chain []cgroup, soft, hard uint64) {
	own := g.keepLimit(chain[0])
	more, less := soft-min(soft, own.Soft), own.Soft-min(soft, own.Soft)
	if hard >= g.used(own.Cgroup) || n.Cgroups.AppliesBelowUse {
		own.Hard = hard
	}
	own.Soft = soft
	for _, ancestor := range chain[1:] {
		if more+less > 0 && ancestor.files {
			above := g.keepLimit(ancestor)
			above.Soft = above.Soft + more - min(above.Soft, less)
		}
	}
}

// setMisc sets a limit in the driver's table. Which return a limit below use gives, and what a cleared one leaves, is
// not known: here Unknown, and nothing.
func (g *GPU) setMisc(c cgroup, soft, hard uint64) error {
	switch {
	case hard < g.used(c.id):
		return refuse(Unknown, "%s uses more", c.path)
	case soft == 0 && hard == NoLimit:
		g.Limits = slices.DeleteFunc(g.Limits, func(l CgroupLimit) bool { return l.Cgroup == c.id })
		for i := range g.Allocations {
			g.Allocations[i].Cgroups = slices.DeleteFunc(g.Allocations[i].Cgroups, func(id string) bool { return id == c.id })
		}
	default:
		own := g.keepLimit(c)
		own.Soft, own.Hard = soft, hard
	}
	return nil
}

// MemoryLimit is nvmlDeviceGetMemoryLimits_v1.
func (n *Node) MemoryLimit(uuid, path string) (MemoryLimit, error) {
	g, chain, err := n.limitable(uuid, path)
	if err != nil {
		return MemoryLimit{}, err
	}
	if n.Cgroups.Backend == Dmem {
		chain = withFiles(chain)
		if len(chain) == 0 {
			return MemoryLimit{}, refuse(NotFound, "%s has no dmem files, nor has an ancestor", path)
		}
	}
	own := g.limit(chain[0].id)
	if own == nil && n.Cgroups.Backend == Misc {
		return MemoryLimit{}, refuse(NotSupported, "%s has no limit", path)
	}
	if own == nil {
		own = &CgroupLimit{Hard: NoLimit}
	}
	return MemoryLimit{own.Soft, own.Hard, g.used(chain[0].id)}, nil
}

// limitable finds the GPU and the cgroup of a call.
func (n *Node) limitable(uuid, path string) (*GPU, []cgroup, error) {
	for _, g := range n.GPUs {
		for _, i := range g.Instances {
			if slices.ContainsFunc(i.Compute, func(c ComputeInstance) bool { return c.UUID == uuid }) {
				return nil, nil, refuse(NotSupported, "%s is a MIG instance", uuid)
			}
		}
	}
	g, err := n.GPU(uuid)
	if err != nil {
		return nil, nil, err
	}
	if n.Cgroups.none() || g.Spec().MemoryMiB == 0 {
		return nil, nil, refuse(NotSupported, "nothing charges the memory of cgroups")
	}
	chain, err := n.Cgroups.find(path)
	if err != nil {
		return nil, nil, refuse(OperatingSystem, "%v", err)
	}
	if len(chain) == 0 {
		return nil, nil, refuse(NotSupported, "%s is the root cgroup", path)
	}
	return g, chain, nil
}

// sweep notes which cgroups the kernel has removed: their limits are forgotten on dmem, and stale on misc.
func (n *Node) sweep() {
	gone := func(l CgroupLimit) bool {
		id, err := identity(l.Path)
		return l.Path != "" && (err != nil || id != l.Cgroup)
	}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		if n.Cgroups.Backend == Dmem {
			g.Limits = slices.DeleteFunc(g.Limits, gone)
			continue
		}
		for j := range g.Limits {
			if gone(g.Limits[j]) {
				g.Limits[j].Path = ""
			}
		}
	}
}

// Inherit gives a new cgroup the address in the kernel of one that was removed, and on misc its stale limits.
func (n *Node) Inherit(path string) error {
	n.sweep()
	id, err := identity(path)
	for i := range n.GPUs {
		limits := n.GPUs[i].Limits
		if j := slices.IndexFunc(limits, func(l CgroupLimit) bool { return l.Path == "" }); j >= 0 {
			limits[j].Cgroup, limits[j].Path = id, path
		}
	}
	return err
}

// limit finds the limit of a cgroup; nil: none.
func (g *GPU) limit(cgroup string) *CgroupLimit {
	i := slices.IndexFunc(g.Limits, func(l CgroupLimit) bool { return l.Cgroup == cgroup })
	if i < 0 {
		return nil
	}
	return &g.Limits[i]
}

// keepLimit is the limit of a cgroup, which from now on has one.
func (g *GPU) keepLimit(c cgroup) *CgroupLimit {
	if g.limit(c.id) == nil {
		g.Limits = append(g.Limits, CgroupLimit{Cgroup: c.id, Path: c.path, Hard: NoLimit})
	}
	return g.limit(c.id)
}

// used is what is charged to a cgroup.
func (g *GPU) used(cgroup string) (sum uint64) {
	for _, a := range g.Allocations {
		if slices.Contains(a.Cgroups, cgroup) {
			sum += a.Bytes
		}
	}
	return sum
}

// taken is the GPU's memory that a process has allocated.
func (g *GPU) taken(pid int) (sum uint64) {
	for _, a := range g.Allocations {
		if a.PID == pid && a.Kind.charged() {
			sum += a.Bytes
		}
	}
	return sum
}

// StartProgram makes a process of a cgroup a CUDA program on a GPU: its context takes memory.
func (n *Node) StartProgram(uuid string, p gpu.Process, cgroup string) error {
	if n.Cgroups.Members == nil {
		n.Cgroups.Members = map[int]string{}
	}
	n.Cgroups.Members[p.PID] = cgroup
	err := n.Allocate(uuid, p.PID, contextMemory, idleMemory)
	if err == nil {
		err = n.AddProcess(uuid, p)
	}
	if err != nil {
		n.RemoveProcess(p.PID)
	}
	return err
}

// Allocate takes memory for a process, or returns ErrOutOfMemory. The driver charges nothing while MIG is on.
func (n *Node) Allocate(uuid string, pid int, kind MemoryKind, bytes uint64) error {
	g, err := n.GPU(uuid)
	if err != nil {
		return err
	}
	a := Allocation{PID: pid, Kind: kind, Bytes: bytes}
	if kind.charged() {
		if memory := g.Memory(gpu.WholeGPU); memory != nil && bytes > uint64(max(0, memory.Free)) {
			return ErrOutOfMemory
		}
		if a.Cgroups, err = n.charge(g, pid, bytes); err != nil {
			return err
		}
	}
	g.Allocations = append(g.Allocations, a)
	return nil
}

// charge finds the cgroups that memory of a process is charged to, or returns ErrOutOfMemory.
func (n *Node) charge(g *GPU, pid int, bytes uint64) (charged []string, err error) {
	if g.MIG {
		return nil, nil
	}
	chain, err := n.charging(pid)
	for _, c := range chain {
		own := g.limit(c.id)
		if own != nil && bytes > own.Hard-min(own.Hard, g.used(c.id)) {
			return nil, ErrOutOfMemory
		}
		if own != nil || n.Cgroups.Backend == Dmem {
			charged = append(charged, c.id)
		}
		if own != nil && n.Cgroups.Backend == Misc {
			return charged, nil
		}
	}
	return charged, err
}

// charging are the cgroup that a process is charged to, and its ancestors; none where nothing is charged.
func (n *Node) charging(pid int) ([]cgroup, error) {
	path, known := n.Cgroups.Members[pid]
	if !known || n.Cgroups.none() {
		return nil, nil
	}
	chain, err := n.Cgroups.find(path)
	return withFiles(chain), err
}

// FreeMemory frees what a process has allocated, but for its contexts.
func (n *Node) FreeMemory(pid int) {
	for i := range n.GPUs {
		g := &n.GPUs[i]
		g.Allocations = slices.DeleteFunc(g.Allocations, func(a Allocation) bool { return a.PID == pid && a.Kind != contextMemory })
	}
}

// MemoryFor is the GPU's memory as a process sees it: in a limited cgroup the limit. On dmem that is the limit of the
// process's own cgroup, on misc that of the nearest limited one.
func (n *Node) MemoryFor(uuid string, pid int) (*gpu.Memory, error) {
	g, err := n.GPU(uuid)
	if err != nil {
		return nil, err
	}
	memory := g.Memory(gpu.WholeGPU)
	chain, err := n.charging(pid)
	if n.Cgroups.Backend == Dmem && len(chain) > 1 {
		chain = chain[:1]
	}
	for _, c := range chain {
		if own := g.limit(c.id); own != nil && memory != nil && own.Hard < uint64(memory.Total) {
			memory.Total, memory.Used = int64(own.Hard), int64(g.used(c.id))
			memory.Free = max(0, min(memory.Free, memory.Total-memory.Used))
			break
		}
	}
	return memory, err
}
