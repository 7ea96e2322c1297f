// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpu is the vocabulary of the hardware: what a GPU is, the part of it that sharing changes, and the narrow
// interface through which that part is read and changed. It holds values only and knows neither Kubernetes nor NVML.
package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Sentinel errors of Hardware, wrapped with what was attempted.
var (
	// ErrBusy: a process holds what was to be changed.
	ErrBusy = errors.New("in use")
	// ErrNotSupported: this GPU, driver or environment cannot do it.
	ErrNotSupported = errors.New("not supported")
	// ErrInsufficient: there is no room for the instance.
	ErrInsufficient = errors.New("insufficient resources")
	// ErrGone: the GPU or the instance does not exist (any more).
	ErrGone = errors.New("not found")
	// ErrResetRequired: the change is noted and takes effect when the GPU is reset.
	ErrResetRequired = errors.New("GPU reset required")
	// ErrPermission: the caller may not do it.
	ErrPermission = errors.New("no permission")
	// ErrDriverMismatch: the driver's library that this process has loaded belongs to another driver version than the
	// kernel module. A new process that loads the library anew can help.
	ErrDriverMismatch = errors.New("driver and library versions differ")
)

// PeersError is the error of a reset that needs other GPUs to be reset in the same command, as GPUs do that NVSwitches
// connect while no fabric manager runs.
type PeersError struct {
	PCIBusIDs []string // of the GPUs that were not named, in the form of Device.PCIBusID
}

// Error names the GPUs.
func (e *PeersError) Error() string {
	return "GPUs that must be reset together with it: " + strings.Join(e.PCIBusIDs, ", ")
}

// ModuleError is the error of a reset that a kernel module prevents by keeping the GPU open. It is an ErrNotSupported
// too: a reboot helps, and so does unloading the module.
type ModuleError struct{ Module string }

// Error says what to do.
func (e *ModuleError) Error() string {
	return fmt.Sprintf("the kernel module %[1]s keeps the GPU open: unload it on the node (modprobe -r %[1]s), or reboot the node", e.Module)
}

// Unwrap returns ErrNotSupported.
func (e *ModuleError) Unwrap() error { return ErrNotSupported }

// Reader reads the GPUs of one node.
type Reader interface {
	// Observe reads the whole node once.
	Observe(ctx context.Context) (Inventory, error)
	// Sample measures how the GPUs are used. GPUs that cannot be read are left out and are the error, beside which the
	// sample has the others.
	Sample(ctx context.Context) (Sample, error)
}

// Sharer says how the processes of a GPU share it.
type Sharer interface {
	MemoryLimiter
	// SetComputeMode says how many processes may use a GPU without MPS.
	SetComputeMode(ctx context.Context, uuid string, mode ComputeMode) error
	// SetPersistence turns the driver's own persistence mode on or off, in which a GPU stays initialized, and keeps its
	// compute mode, while no program has it open. ErrNotSupported: the driver does not do that for the GPU.
	SetPersistence(ctx context.Context, uuid string, on bool) error
	// TimeSlices reads the time slices of GPUs, by UUID. It is no part of Observe, since it takes a program of the
	// driver's for each GPU.
	TimeSlices(ctx context.Context, uuids ...string) (map[string]TimeSlice, error)
	// SetTimeSlice says how long a process keeps a GPU before another one takes its turn. Nothing that runs is
	// disturbed. ErrNotSupported: the driver has no time slice for the GPU, or not in MIG mode.
	SetTimeSlice(ctx context.Context, uuid string, slice TimeSlice) error
}

// MemoryLimiter limits the memory that the processes of a cgroup, and of those below it, allocate on a GPU. A cgroup is
// the full path of its directory.
type MemoryLimiter interface {
	// LimitsMemory finds out whether the driver can, without a write. GPUs that are gone do not count.
	LimitsMemory(ctx context.Context, uuids ...string) (MemoryLimitSupport, error)
	// MemoryLimit reads a limit. ErrNotSupported: the driver has none or, in its own table (misc), none for this cgroup.
	// ErrGone: there is no such cgroup, or none with the controller's files.
	MemoryLimit(ctx context.Context, uuid, cgroup string) (MemoryLimit, error)
	// SetMemoryLimit sets both limits, in bytes; soft 0 and hard NoMemoryLimit are none. Success proves nothing: read it back.
	SetMemoryLimit(ctx context.Context, uuid, cgroup string, soft, hard uint64) error
}

// NoMemoryLimit is the hard limit that is none (NVML_DEVICE_MEMORY_LIMIT_MAX).
const NoMemoryLimit = ^uint64(0)

// MemoryLimit is what the driver says of a cgroup on a GPU, in bytes.
type MemoryLimit struct{ Soft, Hard, Used uint64 }

// MemoryLimitSupport is what a driver has for memory limits.
type MemoryLimitSupport struct {
	Version  string   // of the driver
	Calls    bool     // it has the calls
	Fleeting []string // UUIDs of GPUs that lose them when the last program closes the GPU
}

// Hardware reads and changes the GPUs of one node. Every method returns when its context ends at the latest, and wraps
// one of the sentinel errors where one applies. Handles are opened when needed and held until Close: while any is open,
// a GPU cannot be reset and other programs may find it busy.
type Hardware interface {
	Reader
	Sharer
	// SetMIG turns MIG mode of a GPU on or off. ErrResetRequired: the mode is pending until Reset.
	SetMIG(ctx context.Context, uuid string, enabled bool) error
	// Reset resets GPUs that nothing uses, all of them or none. It waits a while for a program that has one of them
	// open for a moment, and then returns ErrBusy. ErrNotSupported: only a reboot helps. PeersError: others must be
	// reset with them.
	Reset(ctx context.Context, uuids ...string) error
	// CreateInstance creates a GPU instance of the named profile at a placement, and the compute instance that spans
	// it. Afterwards both exist or neither does.
	CreateInstance(ctx context.Context, uuid, profile string, at Placement) error
	// DestroyInstance destroys a GPU instance and its compute instances.
	DestroyInstance(ctx context.Context, uuid string, id int) error
	// Close gives back every handle. The next call opens them again.
	Close() error
}

// Inventory is one observation of a node.
type Inventory struct {
	DriverVersion string
	Devices       []Device // by index
}

// Device is one physical GPU (or vGPU) as observed.
type Device struct {
	UUID              string
	Index             int    // NVML's, which is the order of the PCI addresses
	Minor             int    // of its device file, such as 0 of /dev/nvidia0; -1: unknown
	PCIBusID          string // domain:bus:device.function in lower case, such as 0000:07:00.0
	Product           string // NVML's name, such as "NVIDIA A100-SXM4-40GB"
	MemoryMiB         int64
	ComputeCapability ComputeCapability
	Virtual           bool // a vGPU in a guest
	License           License
	MIGCapable        bool
	PendingMIG        bool // the MIG mode after the next reset; equals State.MIG when nothing is pending
	Persistence       Persistence
	Profiles          []Profile // MIG profiles by driver id; known for MIG capable GPUs, on some drivers only in MIG mode
	State             State
	Before            []Instance // as last reported. If they were lost, as by a reboot, they return to their places
	Processes         []Process  // that use the GPU, by PID
	ProcessesUnknown  bool       // the driver's lists of processes cannot be used, so that Processes is empty
	ResetPeers        []string   // UUIDs of the GPUs that must be reset with it, as far as a reset has told, by index
	Holders           []Holder   // to whom the kubelet allocated it, by namespace, pod and container
}

// License is whether a vGPU has the license of NVIDIA's that it needs. Without one the guest's driver slows it down.
type License string

// The licenses. NVML does not report one of a GPU that is no vGPU, nor do all drivers of those that are.
const (
	LicenseUnknown License = ""
	Licensed       License = "Licensed"
	Unlicensed     License = "Unlicensed"
)

// State is the part of a GPU that sharing changes. Every strategy reduces to one State, so that one Diff serves all.
type State struct {
	MIG         bool
	Instances   []Instance // by placement
	ComputeMode ComputeMode
	MPS         *MPSDaemon // nil when no daemon serves the GPU
	TimeSlice   TimeSlice  // empty when it was not read, or is not to be changed
}

// TimeSlice is how long a process keeps a GPU before another one takes its turn. NVIDIA publishes no durations.
type TimeSlice string

// The time slices. The driver begins with the default one after each reset and each time that it is loaded.
const (
	TimeSliceUnread  TimeSlice = ""
	TimeSliceNone    TimeSlice = "None" // the driver shows none for the GPU
	TimeSliceDefault TimeSlice = "Default"
	TimeSliceShort   TimeSlice = "Short"
	TimeSliceMedium  TimeSlice = "Medium"
	TimeSliceLong    TimeSlice = "Long"
)

// TimeSlices are those that can be set, each at the place that is its number for nvidia-smi compute-policy
// --set-timeslice.
func TimeSlices() []TimeSlice {
	return []TimeSlice{TimeSliceDefault, TimeSliceShort, TimeSliceMedium, TimeSliceLong}
}

// ComputeCapability is the version of a GPU's architecture.
type ComputeCapability struct{ Major, Minor int }

// String is the usual form, such as 8.0.
func (c ComputeCapability) String() string { return fmt.Sprintf("%d.%d", c.Major, c.Minor) }

// AtLeast reports whether c is major.minor or newer.
func (c ComputeCapability) AtLeast(major, minor int) bool {
	return c.Major > major || c.Major == major && c.Minor >= minor
}

// ComputeMode says how many processes may use a GPU without MPS; the values are NVML's.
type ComputeMode int

// The compute modes that occur. NVML's EXCLUSIVE_THREAD is obsolete.
const (
	ComputeDefault          ComputeMode = 0
	ComputeProhibited       ComputeMode = 2
	ComputeExclusiveProcess ComputeMode = 3
)

// String is the name that nvidia-smi uses.
func (m ComputeMode) String() string {
	switch m {
	case ComputeDefault:
		return "DEFAULT"
	case ComputeProhibited:
		return "PROHIBITED"
	case ComputeExclusiveProcess:
		return "EXCLUSIVE_PROCESS"
	}
	return fmt.Sprintf("ComputeMode(%d)", int(m))
}

// Persistence is whether the driver keeps a GPU initialized while no program has it open. Where it does not, the compute
// mode is lost with the last one (NVIDIA, "Driver Persistence").
type Persistence int

// The states of it.
const (
	PersistenceOn          Persistence = iota // or not known
	PersistenceOff                            // neither nvidia-persistenced nor the driver's own mode
	PersistenceUnsupported                    // off, and it cannot be turned on
)

// Placement is where an instance lies on the memory slices of a GPU.
type Placement struct{ Start, Size int }

// String is nvidia-smi's form, start:size.
func (p Placement) String() string { return fmt.Sprintf("%d:%d", p.Start, p.Size) }

// Overlaps reports whether two placements share a slice.
func (p Placement) Overlaps(q Placement) bool {
	return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

// Profile is a MIG profile of a GPU as the driver describes it.
type Profile struct {
	Name      string // such as 1g.10gb+me
	ID        int    // the driver's number of the profile, which nvidia-smi mig -cgi takes
	Slices    int    // compute slices
	MemoryMiB int64
	Max       int   // largest number of such instances on the GPU
	Size      int   // memory slices
	Starts    []int // memory slices at which an instance may begin, ascending
}

// Instance is a MIG instance: a GPU instance with the compute instance that spans it.
type Instance struct {
	Profile   string
	Placement Placement
	ID        int    // of the GPU instance; meaningless in a wanted state
	UUID      string // of the MIG device; empty in a wanted state
	// Partial marks a GPU instance without its compute instance, which a crash between two driver calls leaves behind,
	// or with smaller ones, which NVIDIA's device plugin cannot advertise. Never wanted.
	Partial bool
}

// MPSDaemon is the MPS control daemon that serves a GPU. GPUs with the same Resource are served by one daemon.
type MPSDaemon struct {
	Resource               string // extended resource whose clients it serves; names the pipe directory
	External               bool   // run by NVIDIA's MPS DaemonSet, not by us
	MultiUser              bool   // one server for the clients of all users
	ActiveThreadPercentage int    // of a client, 1 to 100
	PinnedMemoryLimitMiB   int64  // of a client on this GPU; 0: no limit
}

// MPSServer is the program of NVIDIA's MPS server, which holds a GPU for its clients.
const MPSServer = "nvidia-cuda-mps-server"

// WholeGPU is the instance of a process or holder that uses no MIG instance.
const WholeGPU = -1

// Process is a process that uses a GPU.
type Process struct {
	PID         int
	Name        string
	Instance    int // GPU instance id or WholeGPU
	PodUID      string
	ContainerID string
	MPSServer   bool // NVIDIA's MPS server, which holds the GPU for its clients
}

// Holder is a container to which the kubelet allocated a GPU, a replica of it or one of its instances.
type Holder struct {
	Namespace, Pod, Container string
	Instance                  int // GPU instance id or WholeGPU
}

// InUse reports whether a process or a holder uses the instance with that id. Users of the whole GPU do not count: in
// MIG mode there are none but monitors.
func (d Device) InUse(id int) bool {
	for _, p := range d.Processes {
		if p.Instance == id {
			return true
		}
	}
	for _, h := range d.Holders {
		if h.Instance == id {
			return true
		}
	}
	return false
}

// Idle reports whether nothing at all uses the GPU or an instance of it. An idle MPS server does not count.
func (d Device) Idle() bool {
	for _, p := range d.Processes {
		if !p.MPSServer {
			return false
		}
	}
	return len(d.Holders) == 0
}

// MemorySlices is the number of memory slices of a GPU: where its farthest placement ends.
func (d Device) MemorySlices() int {
	slices := 0
	for _, p := range d.Profiles {
		for _, start := range p.Starts {
			slices = max(slices, start+p.Size)
		}
	}
	return slices
}

// ComputeSlices is the number of compute slices of a GPU: those of its largest profile.
func (d Device) ComputeSlices() int {
	slices := 0
	for _, p := range d.Profiles {
		slices = max(slices, p.Slices)
	}
	return slices
}

// SmallestFirst are the MIG profiles of a GPU in the order in which a user looks for one.
func (d Device) SmallestFirst() []Profile {
	return slices.SortedFunc(slices.Values(d.Profiles), func(a, b Profile) int {
		return cmp.Or(cmp.Compare(a.Slices, b.Slices), cmp.Compare(a.Size, b.Size), cmp.Compare(a.Name, b.Name))
	})
}

// Profile finds a profile by its exact name.
func (d Device) Profile(name string) (Profile, bool) {
	for _, p := range d.Profiles {
		if p.Name == name {
			return p, true
		}
	}
	return Profile{}, false
}

// ProductLabel is a product's name as users and labels write it, with dashes for spaces and without the characters that
// a label cannot have: "NVIDIA A100-SXM4-40GB" is NVIDIA-A100-SXM4-40GB. It equals the value that NVIDIA's GPU Feature
// Discovery gives nvidia.com/gpu.product, but for the suffixes -SHARED and -MIG-….
func ProductLabel(name string) string {
	kept := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', strings.ContainsRune("-_. ", r):
			return r
		}
		return -1
	}, name)
	return strings.Join(strings.Fields(kept), "-")
}

// String is how messages name a GPU: by the index that nvidia-smi shows and the product, such as
// "GPU 0 (NVIDIA-A100-SXM4-40GB)".
func (d Device) String() string {
	return fmt.Sprintf("GPU %d (%s)", d.Index, ProductLabel(d.Product))
}

// Sample is one measurement of how the GPUs of a node are used. A value that the driver does not give is nil, never 0.
type Sample struct {
	Devices []DeviceUse // by index
}

// DeviceUse is how one GPU is used.
type DeviceUse struct {
	UUID             string
	Index            int           // NVML's
	Minor            int           // of its device file; -1: unknown
	Memory           *Memory       // nil, for example, on a GPU that shares the memory of the host
	Utilization      *Utilization  // nil in MIG mode (NVML, nvmlDeviceGetUtilizationRates), in which the instances have it
	Instances        []InstanceUse // those with a compute instance, by id
	Processes        []ProcessUse  // by PID
	ProcessesUnknown bool          // the driver's lists of processes cannot be used, so that Processes is empty
}

// InstanceUse is how a MIG instance is used.
type InstanceUse struct {
	ID        int // of the GPU instance
	UUID      string
	ProfileID int // the driver's number of its profile; -1: unknown, and Start with it
	Start     int // the memory slice at which it begins
	Memory    *Memory
	// Utilization is that of the instance's own part of the GPU while it was measured: of its streaming multiprocessors
	// those that were busy, and of its memory bandwidth what was used. Nil before Hopper, and where the driver does not
	// report it (NVML, "GPM").
	Utilization *Utilization
}

// Memory is GPU memory in bytes. What the driver reserves for itself counts in none but Total.
type Memory struct {
	Total int64 `json:"total"`
	Used  int64 `json:"used"`
	Free  int64 `json:"free"`
}

// Utilization is the part of the driver's last sample period, 0 to 1, in which something was at work. InstanceUse has
// another definition.
type Utilization struct {
	Compute float64 `json:"compute"` // the streaming multiprocessors
	Memory  float64 `json:"memory"`  // the memory controller
}

// ProcessUse is how a process uses a GPU.
type ProcessUse struct {
	PID         int
	Instance    int  // GPU instance id or WholeGPU
	MPSClient   bool // it uses the GPU through MPS, whose server has the utilization of all its clients
	MemoryBytes *int64
	// Utilization is nil for a process that did no work in the last seconds too, since NVML lists only those that did,
	// as well as in MIG mode and for MPS clients.
	Utilization *Utilization
}
