// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Op names a method of gpu.Hardware.
type Op string

// The operations, as Fail and Writes name them. CreateComputeInstance is the second half of CreateInstance.
const (
	OpObserve               Op = "Observe"
	OpSample                Op = "Sample"
	OpSetMIG                Op = "SetMIG"
	OpReset                 Op = "Reset"
	OpCreateInstance        Op = "CreateInstance"
	OpCreateComputeInstance Op = "CreateComputeInstance"
	OpDestroyInstance       Op = "DestroyInstance"
	OpSetComputeMode        Op = "SetComputeMode"
	OpSetPersistence        Op = "SetPersistence"
	OpTimeSlices            Op = "TimeSlices"
	OpSetTimeSlice          Op = "SetTimeSlice"
	OpLimitsMemory          Op = "LimitsMemory"
	OpMemoryLimit           Op = "MemoryLimit"
	OpSetMemoryLimit        Op = "SetMemoryLimit"
)

// Hardware serves a Node as gpu.Hardware. It may be used by several goroutines.
type Hardware struct {
	// Fail is asked before each operation; its error is returned in place of the operation's effect. It must not call
	// back. The UUID is empty for OpObserve and OpSample. If CreateComputeInstance fails the GPU instance is taken
	// back, unless the error is ErrCrash, after which it stays behind, as it does after a crash.
	Fail func(op Op, uuid string) error

	mu       sync.Mutex
	node     *Node
	writes   []string
	together bool // a reset has told that GPUs must be reset together
}

// ErrCrash ends an operation where it stands, if Fail returns it.
var ErrCrash = errors.New("the process ends here")

var _ gpu.Hardware = (*Hardware)(nil)

// New is the hardware of a node with these GPUs. It panics on a model that is not in the catalogue.
func New(models ...Model) *Hardware {
	n, err := NewNode("sim", models...)
	if err != nil {
		panic(err) // a mistake in a test, which it ends
	}
	return On(n)
}

// On is the hardware of a node, which it takes over.
func On(n *Node) *Hardware { return &Hardware{node: n} }

// Update gives a test the state to look at and change.
func (h *Hardware) Update(change func(*Node)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(h.node)
}

// AddProcess puts a process on a GPU.
func (h *Hardware) AddProcess(uuid string, p gpu.Process) (err error) {
	h.Update(func(n *Node) { err = n.AddProcess(uuid, p) })
	return err
}

// RemoveProcess ends a process.
func (h *Hardware) RemoveProcess(pid int) { h.Update(func(n *Node) { n.RemoveProcess(pid) }) }

// SetHolders says to which containers the kubelet allocated a GPU.
func (h *Hardware) SetHolders(uuid string, holders ...gpu.Holder) (err error) {
	h.Update(func(n *Node) {
		var g *GPU
		if g, err = n.GPU(uuid); err == nil {
			g.Holders = holders
		}
	})
	return err
}

// Reboot boots the node anew.
func (h *Hardware) Reboot() { h.Update((*Node).Reboot) }

// Clone is separate hardware in the same state, without Fail and record.
func (h *Hardware) Clone() *Hardware {
	h.mu.Lock()
	defer h.mu.Unlock()
	return On(h.node.Clone())
}

// Clone is a copy that shares nothing.
func (n *Node) Clone() *Node {
	raw, err := json.Marshal(n)
	c := &Node{}
	if err == nil {
		err = json.Unmarshal(raw, c)
	}
	if err != nil {
		panic(err) // the state is plain data
	}
	return c
}

// Writes lists the operations so far that changed something or tried to, in order, as "SetMIG GPU-… true".
func (h *Hardware) Writes() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.writes)
}

// Observe implements gpu.Hardware.
func (h *Hardware) Observe(ctx context.Context) (gpu.Inventory, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.allowed(ctx, OpObserve, ""); err != nil {
		return gpu.Inventory{}, fmt.Errorf("observing the GPUs: %w", err)
	}
	inv := h.node.Observe()
	if h.together {
		h.node.describePeers(inv.Devices)
	}
	return inv, nil
}

// SetMIG implements gpu.Hardware.
func (h *Hardware) SetMIG(ctx context.Context, uuid string, enabled bool) error {
	return h.write(ctx, OpSetMIG, uuid, fmt.Sprint(enabled), func() error {
		activation, err := h.node.SetMIG(uuid, enabled, 0)
		if err == nil && activation != Success {
			err = fmt.Errorf("%w: MIG mode is pending, activating it gave %s", gpu.ErrResetRequired, activation)
		}
		return err
	})
}

// Reset implements gpu.Hardware.
func (h *Hardware) Reset(ctx context.Context, uuids ...string) error {
	return h.write(ctx, OpReset, strings.Join(uuids, " "), "", func() error {
		restore, err := h.endPersistence(uuids)
		if err != nil {
			return err
		}
		defer restore()
		err = h.node.Reset(0, uuids...)
		if _, peers := errors.AsType[*gpu.PeersError](err); peers {
			h.together = true
		}
		if err == nil && len(uuids) > 1 {
			h.together = false // a fabric manager may run before the next reset, which tells again
		}
		if h.node.DRM && errors.Is(err, gpu.ErrBusy) {
			err = &gpu.ModuleError{Module: "nvidia_drm"}
		}
		return err
	})
}

// endPersistence turns persistence mode off, as the driver's nvidia-smi does for a reset, and says how to restore it.
func (h *Hardware) endPersistence(uuids []string) (restore func(), err error) {
	var persistent []*GPU
	for _, uuid := range uuids {
		g, err := h.node.GPU(uuid)
		if err != nil {
			return nil, err
		}
		if g.Persistence {
			persistent = append(persistent, g)
		}
	}
	set := func(on bool) {
		for _, g := range persistent {
			g.Persistence = on
		}
	}
	set(false)
	return func() { set(true) }, nil
}

// CreateInstance implements gpu.Hardware.
func (h *Hardware) CreateInstance(ctx context.Context, uuid, profile string, at gpu.Placement) error {
	return h.write(ctx, OpCreateInstance, uuid, profile+" at "+at.String(), func() error {
		p, err := h.node.profileNamed(uuid, profile)
		if err != nil {
			return err
		}
		i, err := h.node.CreateGPUInstance(uuid, p.ID, &at)
		if err != nil {
			return err
		}
		err = h.allowed(ctx, OpCreateComputeInstance, uuid)
		if err == nil {
			_, err = h.node.CreateComputeInstance(uuid, i.ID, p.Slices)
		}
		if err != nil && err != ErrCrash { //nolint:errorlint // Fail returns it bare
			err = joinUndo(err, h.node.DestroyGPUInstance(uuid, i.ID))
		}
		return err
	})
}

func joinUndo(err, undo error) error {
	if undo != nil {
		return fmt.Errorf("%w (taking the GPU instance back: %v)", err, undo) //nolint:errorlint // the cause is err
	}
	return err
}

// DestroyInstance implements gpu.Hardware.
func (h *Hardware) DestroyInstance(ctx context.Context, uuid string, id int) error {
	return h.write(ctx, OpDestroyInstance, uuid, fmt.Sprint(id), func() error {
		g, err := h.node.GPU(uuid)
		if err != nil {
			return err
		}
		i, err := g.instance(id)
		if err != nil {
			return err
		}
		for _, c := range slices.Clone(i.Compute) {
			if err := h.node.DestroyComputeInstance(uuid, id, c.ID); err != nil {
				return err
			}
		}
		return h.node.DestroyGPUInstance(uuid, id)
	})
}

// SetComputeMode implements gpu.Hardware.
func (h *Hardware) SetComputeMode(ctx context.Context, uuid string, mode gpu.ComputeMode) error {
	return h.write(ctx, OpSetComputeMode, uuid, mode.String(), func() error {
		if g, err := h.node.GPU(uuid); err == nil && g.ComputeMode == mode {
			return nil
		}
		return h.node.SetComputeMode(uuid, mode)
	})
}

// SetPersistence implements gpu.Hardware.
func (h *Hardware) SetPersistence(ctx context.Context, uuid string, on bool) error {
	return h.write(ctx, OpSetPersistence, uuid, strconv.FormatBool(on), func() error {
		g, err := h.node.GPU(uuid)
		if err == nil {
			g.Persistence = on
		}
		return err
	})
}

// TimeSlices implements gpu.Hardware.
func (h *Hardware) TimeSlices(ctx context.Context, uuids ...string) (map[string]gpu.TimeSlice, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	found := map[string]gpu.TimeSlice{}
	for _, uuid := range uuids {
		err := h.allowed(ctx, OpTimeSlices, uuid)
		if err == nil {
			found[uuid], err = h.node.TimeSlice(uuid)
		}
		if errors.Is(err, gpu.ErrNotSupported) {
			found[uuid], err = gpu.TimeSliceNone, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading the time slice of GPU %s: %w", uuid, err)
		}
	}
	return found, nil
}

// SetTimeSlice implements gpu.Hardware.
func (h *Hardware) SetTimeSlice(ctx context.Context, uuid string, slice gpu.TimeSlice) error {
	return h.write(ctx, OpSetTimeSlice, uuid, string(slice), func() error { return h.node.SetTimeSlice(uuid, slice) })
}

// LimitsMemory implements gpu.Hardware. Drivers have the calls from 615 on.
func (h *Hardware) LimitsMemory(ctx context.Context, uuids ...string) (gpu.MemoryLimitSupport, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.allowed(ctx, OpLimitsMemory, ""); err != nil {
		return gpu.MemoryLimitSupport{}, err
	}
	support := gpu.MemoryLimitSupport{Version: h.node.DriverVersion, Calls: h.node.limitsMemory()}
	for _, uuid := range uuids {
		if g, err := h.node.GPU(uuid); err == nil && !g.Persistence && !h.node.persistenced(uuid) {
			support.Fleeting = append(support.Fleeting, uuid)
		}
	}
	return support, nil
}

// MemoryLimit implements gpu.Hardware.
func (h *Hardware) MemoryLimit(ctx context.Context, uuid, cgroup string) (gpu.MemoryLimit, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.allowed(ctx, OpMemoryLimit, uuid)
	if err == nil && !h.node.limitsMemory() {
		panic("a driver without the call ends the process")
	}
	if err != nil {
		return gpu.MemoryLimit{}, err
	}
	found, err := h.node.MemoryLimit(uuid, cgroup)
	return gpu.MemoryLimit(found), cgroupGone(err)
}

// SetMemoryLimit implements gpu.Hardware.
func (h *Hardware) SetMemoryLimit(ctx context.Context, uuid, cgroup string, soft, hard uint64) error {
	return h.write(ctx, OpSetMemoryLimit, uuid, fmt.Sprintf("%s %d", cgroup, hard), func() error {
		if !h.node.limitsMemory() {
			panic("a driver without the call ends the process")
		}
		return cgroupGone(h.node.SetMemoryLimit(uuid, cgroup, soft, hard, true))
	})
}

// limitsMemory reports whether the driver has memory limits: from 615 on.
func (n *Node) limitsMemory() bool {
	branch, _, _ := strings.Cut(n.DriverVersion, ".")
	number, err := strconv.Atoi(branch)
	return err == nil && number >= 615
}

// cgroupGone is what a path that cannot be opened means for the agent.
func cgroupGone(err error) error {
	if refused, is := errors.AsType[*Error](err); is && refused.Return == OperatingSystem {
		return fmt.Errorf("%w: %w", gpu.ErrGone, err)
	}
	return err
}

// Close implements gpu.Hardware.
func (h *Hardware) Close() error {
	h.Update((*Node).Forget)
	return nil
}

func (h *Hardware) write(ctx context.Context, op Op, uuid, detail string, do func() error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	what := fmt.Sprintf("%s %s", op, uuid)
	if detail != "" {
		what += " " + detail
	}
	err := h.allowed(ctx, op, uuid)
	if err == nil {
		h.writes = append(h.writes, what)
		err = do()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

func (h *Hardware) allowed(ctx context.Context, op Op, uuid string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if h.Fail == nil {
		return nil
	}
	return h.Fail(op, uuid)
}

func (n *Node) profileNamed(uuid, name string) (Profile, error) {
	g, err := n.GPU(uuid)
	if err != nil {
		return Profile{}, err
	}
	for _, p := range g.Spec().Profiles {
		if p.Name == name {
			return p, nil
		}
	}
	return Profile{}, refuse(NotSupported, "%s has no MIG profile %s", g.Spec().Product, name)
}
