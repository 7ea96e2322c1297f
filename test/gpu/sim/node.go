// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sim holds the rules of NVIDIA's hardware as NVML shows it: MIG mode and pending mode, placements and room for
// instances, who holds what, reset and reboot. Node is the state, a plain value that can be kept in a file; its methods
// are the rules, and refuse what NVML refuses with the return that NVML gives. Hardware serves a Node as gpu.Hardware,
// fails on request and records what was changed. The cgroups that memory is charged to are folders.
//
// Rules and their sources: NVML API reference (device, MIG and GPU instance commands), MIG User Guide, and the facts in
// the catalogue (internal/gpu/catalogue). What is not simulated: memory contents, clocks, NVLink, performance.
package sim

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
)

// Node is the state of the GPUs of one node.
type Node struct {
	Name          string // makes the UUIDs of one node differ from those of others
	DriverVersion string
	Boot          int // how often the node has booted
	Serial        int // of the last UUID given out
	GPUs          []GPU
	Clients       []Client // programs that have the driver open
	NVSwitch      bool     // NVSwitches connect the GPUs
	DRM           bool     // the kernel module nvidia_drm is loaded, which has every GPU open
	Cgroups       Cgroups  `json:",omitzero"`
	Forgets       bool     // no other program has a GPU open for long: one that nobody has open forgets its compute mode
}

// GPU is the state of one GPU.
type GPU struct {
	Model       Model
	UUID        string
	PCIBusID    string
	NoReset     bool // as in a virtual machine, where the hypervisor owns the reset
	Unlicensed  bool // a vGPU that got no license
	Persistence bool // legacy persistence mode, which the kernel module keeps; nvidia-persistenced is a Client
	MIG         bool
	PendingMIG  bool
	ComputeMode gpu.ComputeMode
	Slice       gpu.TimeSlice    `json:",omitempty"` // empty: the default one
	Instances   []GPUInstance    // by placement
	Processes   []gpu.Process    // by PID
	Uses        []gpu.ProcessUse `json:",omitempty"` // of the processes of which a test says how they use the GPU
	Limits      []CgroupLimit    `json:",omitempty"`
	Allocations []Allocation     `json:",omitempty"` // of programs that StartProgram has started
	Holders     []gpu.Holder     // not of the hardware's concern; carried for tests
}

// GPUInstance is a GPU instance; the instance of package gpu is this with the compute instance that spans it.
type GPUInstance struct {
	ID        int
	Profile   int // driver id of its profile
	Placement gpu.Placement
	Compute   []ComputeInstance // by start
}

// ComputeInstance is a compute instance of a GPU instance. NVML makes a MIG device of it.
type ComputeInstance struct {
	ID     int // unique within the GPU instance
	Start  int // compute slice at which it begins
	Slices int
	UUID   string
}

// Client is a program that has the driver open.
type Client struct {
	PID       int
	Started   uint64   // tells a reused PID from the same process; 0 where it does not matter
	Program   string   // empty where it does not matter
	Only      []string // UUIDs of the GPUs that it has open; empty: all
	Except    []string // UUIDs of GPUs that it does not have open
	Instances []string // UUIDs of MIG devices to which it has handles. They cannot be destroyed, though it is no process on them
	Switches  bool     // it has the NVSwitches open, and no GPU, as the fabric manager does
}

// Opens reports whether a client has a GPU open.
func (c Client) Opens(uuid string) bool {
	return !c.Switches && (len(c.Only) == 0 || slices.Contains(c.Only, uuid)) && !slices.Contains(c.Except, uuid)
}

// driverVersion is of the branch that was current when the rules were written down.
const driverVersion = "580.95.05"

// NewNode is a freshly booted node with these GPUs, in the order of their PCI addresses.
func NewNode(name string, models ...Model) (*Node, error) {
	n := &Node{Name: name, DriverVersion: driverVersion, Boot: 1}
	for i, m := range models {
		spec, err := SpecOf(m)
		if err != nil {
			return nil, err
		}
		n.GPUs = append(n.GPUs, GPU{
			Model: m, UUID: n.newUUID("GPU"), PCIBusID: fmt.Sprintf("0000:%02x:00.0", 7+8*i), NoReset: spec.Virtual,
		})
	}
	return n, nil
}

// GPU finds a GPU.
func (n *Node) GPU(uuid string) (*GPU, error) {
	i := slices.IndexFunc(n.GPUs, func(g GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return nil, refuse(NotFound, "no GPU %s on this node", uuid)
	}
	return &n.GPUs[i], nil
}

// Spec is what does not change about the GPU.
func (g *GPU) Spec() Spec {
	spec, _ := SpecOf(g.Model) // NewNode has seen the model
	return spec
}

// Profile finds a profile of the GPU by its driver id.
func (g *GPU) Profile(id int) (Profile, bool) {
	for _, p := range g.Spec().Profiles {
		if p.ID == id {
			return p, true
		}
	}
	return Profile{}, false
}

// newUUID gives out a UUID that no other call has given out.
func (n *Node) newUUID(prefix string) string {
	n.Serial++
	h := sha256.Sum256(fmt.Appendf(nil, "%s/%d", n.Name, n.Serial))
	h[6] = h[6]&0x0f | 0x50
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("%s-%x-%x-%x-%x-%x", prefix, h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// What a GPU of a model is, and which models there are.
type (
	// Model names a GPU of the catalogue.
	Model = catalogue.Model
	// Spec is what does not change about a GPU of a model.
	Spec = catalogue.Spec
	// Profile is a MIG profile with all that NVML tells about it.
	Profile = catalogue.Profile
)

// The models that tests name most; Models lists all.
const (
	A100   = catalogue.A100
	A10080 = catalogue.A10080
	A30    = catalogue.A30
	H100   = catalogue.H100
	H200   = catalogue.H200
	B200   = catalogue.B200
	T4     = catalogue.T4
	V100   = catalogue.V100
	L40S   = catalogue.L40S
	GB10   = catalogue.GB10
	VGPU   = catalogue.VGPU
)

// Models lists the catalogue: GPUs with MIG in the order of the table, then those without.
func Models() (models []Model) {
	specs, _ := catalogue.Specs()
	for _, s := range specs {
		models = append(models, s.Model)
	}
	return models
}

// SpecOf finds a model in the catalogue.
func SpecOf(m Model) (Spec, error) {
	specs, err := catalogue.Specs()
	at := slices.IndexFunc(specs, func(s Spec) bool { return s.Model == m })
	if err != nil || at < 0 {
		return Spec{}, cmp.Or(err, fmt.Errorf("unknown GPU model %q: the models are %v", m, Models()))
	}
	return specs[at], nil
}

// Return is what an NVML call returns; the numbers are NVML's.
type Return int

// The returns that the rules give.
const (
	Success               Return = 0
	InvalidArgument       Return = 2
	NotSupported          Return = 3
	NoPermission          Return = 4
	NotFound              Return = 6
	InsufficientSize      Return = 7
	DriverNotLoaded       Return = 9
	Timeout               Return = 10
	GPUIsLost             Return = 15
	ResetRequired         Return = 16
	OperatingSystem       Return = 17
	InUse                 Return = 19
	InsufficientResources Return = 23
	Unknown               Return = 999
)

// String is NVML's name of the return.
func (r Return) String() string {
	switch r {
	case Success:
		return "SUCCESS"
	case InvalidArgument:
		return "ERROR_INVALID_ARGUMENT"
	case NotSupported:
		return "ERROR_NOT_SUPPORTED"
	case NoPermission:
		return "ERROR_NO_PERMISSION"
	case NotFound:
		return "ERROR_NOT_FOUND"
	case InsufficientSize:
		return "ERROR_INSUFFICIENT_SIZE"
	case DriverNotLoaded:
		return "ERROR_DRIVER_NOT_LOADED"
	case Timeout:
		return "ERROR_TIMEOUT"
	case GPUIsLost:
		return "ERROR_GPU_IS_LOST"
	case ResetRequired:
		return "ERROR_RESET_REQUIRED"
	case OperatingSystem:
		return "ERROR_OPERATING_SYSTEM"
	case InUse:
		return "ERROR_IN_USE"
	case InsufficientResources:
		return "ERROR_INSUFFICIENT_RESOURCES"
	case Unknown:
		return "ERROR_UNKNOWN"
	}
	return fmt.Sprintf("ERROR_%d", int(r))
}

// Error is a refusal by the rules. It wraps the sentinel error of package gpu that belongs to its return, if any.
type Error struct {
	Return Return
	Why    string
	Peers  []string // PCI addresses of GPUs without which others cannot be reset
}

// Error names the return and why the rules gave it.
func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Return, e.Why) }

// Unwrap is the error of package gpu.
func (e *Error) Unwrap() error {
	if len(e.Peers) > 0 {
		return &gpu.PeersError{PCIBusIDs: e.Peers}
	}
	switch e.Return {
	case InUse:
		return gpu.ErrBusy
	case NotSupported:
		return gpu.ErrNotSupported
	case InsufficientResources:
		return gpu.ErrInsufficient
	case NotFound, GPUIsLost:
		return gpu.ErrGone
	case ResetRequired:
		return gpu.ErrResetRequired
	case NoPermission:
		return gpu.ErrPermission
	case Success, InvalidArgument, InsufficientSize, DriverNotLoaded, Timeout, OperatingSystem, Unknown:
	}
	return nil
}

func refuse(r Return, format string, args ...any) error {
	return &Error{Return: r, Why: fmt.Sprintf(format, args...)}
}
