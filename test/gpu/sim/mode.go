// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// SetMIG asks for a MIG mode on behalf of the process self. As in nvmlDeviceSetMigMode the request is noted even where
// it cannot be activated: the activation then is InUse (another program uses the GPU) or ResetRequired (the reset is
// not the driver's to make alone), and the mode is pending until Reset.
func (n *Node) SetMIG(uuid string, enabled bool, self int) (activation Return, err error) {
	g, err := n.GPU(uuid)
	if err != nil {
		return Unknown, err
	}
	if !g.Spec().MIGCapable() {
		return NotSupported, refuse(NotSupported, "%s has no MIG", g.Spec().Product)
	}
	g.PendingMIG = enabled
	if g.MIG == enabled {
		return Success, nil
	}
	if len(g.Instances) > 0 || len(g.Processes) > 0 {
		return InUse, nil
	}
	if g.Spec().ResetOnModeChange {
		if g.NoReset || len(n.ResetPeers(uuid)) > 0 {
			return ResetRequired, nil
		}
		if g.Persistence || n.openByOthers(uuid, self) {
			return InUse, nil
		}
	}
	g.activate()
	return Success, nil
}

// activate makes the pending mode the current one. With MIG the compute mode is DEFAULT (NVML,
// nvmlDeviceSetComputeMode).
func (g *GPU) activate() {
	g.MIG = g.PendingMIG
	if g.MIG {
		g.ComputeMode = gpu.ComputeDefault
	}
}

// Reset resets GPUs on behalf of the process self, as one run of nvidia-smi -r does: no process may use them and no
// other program may have them open. All of them are reset or none.
func (n *Node) Reset(self int, uuids ...string) error {
	for _, uuid := range uuids {
		if err := n.CanReset(uuid, self); err != nil {
			return err
		}
	}
	if peers := n.ResetPeers(uuids...); len(peers) > 0 {
		return &Error{Return: NotSupported, Why: "GPUs that are connected through NVSwitches must be reset together", Peers: peers}
	}
	for _, uuid := range uuids {
		g, err := n.GPU(uuid)
		if err != nil {
			return err
		}
		g.clear()
	}
	return nil
}

// CanReset says why a GPU cannot be reset. Legacy persistence mode counts as a holder, which is the worst that it could
// be.
func (n *Node) CanReset(uuid string, self int) error {
	g, err := n.GPU(uuid)
	if err != nil {
		return err
	}
	switch {
	case g.NoReset:
		return refuse(NotSupported, "GPU %s cannot be reset from within this machine", g.PCIBusID)
	case len(g.Processes) > 0:
		return refuse(InUse, "process %d (%s) uses GPU %s", g.Processes[0].PID, g.Processes[0].Name, g.PCIBusID)
	case g.Persistence:
		return refuse(InUse, "GPU %s is in persistence mode", g.PCIBusID)
	case n.openByOthers(uuid, self):
		return refuse(InUse, "another program has GPU %s open", g.PCIBusID)
	}
	return nil
}

// ResetPeers lists the PCI addresses of the GPUs that must be reset together with some, and are not among them: without
// a fabric manager, all Ampere GPUs that NVSwitches connect.
func (n *Node) ResetPeers(uuids ...string) []string {
	managed := slices.ContainsFunc(n.Clients, func(c Client) bool { return c.Switches })
	connected := slices.ContainsFunc(n.GPUs, func(g GPU) bool { return g.switched() && slices.Contains(uuids, g.UUID) })
	if !n.NVSwitch || managed || !connected {
		return nil
	}
	var missing []string
	for _, g := range n.GPUs {
		if g.switched() && !slices.Contains(uuids, g.UUID) {
			missing = append(missing, g.PCIBusID)
		}
	}
	return missing
}

// switched reports whether the NVSwitches of a node connect GPUs of this kind, and take part in resets.
func (g *GPU) switched() bool { return g.Spec().ResetOnModeChange }

// Reboot boots the node anew: no process survives, and no instance; the MIG mode only where it is kept in the GPU.
func (n *Node) Reboot() {
	n.Boot++
	n.Clients = nil
	n.Reload()
}

// Reload loads the kernel module anew, which does to the GPUs what a boot does.
func (n *Node) Reload() {
	for i := range n.GPUs {
		n.GPUs[i].Start()
	}
}

// Start is the kernel module that finds a GPU, at its own start or when the GPU comes to the bus: of what was set since
// the last time it has nothing, but the MIG mode where that is kept in the GPU.
func (g *GPU) Start() {
	g.Processes, g.Uses, g.Persistence = nil, nil, false
	if !g.Spec().ModeSurvivesBoot {
		g.PendingMIG = false
	}
	g.clear()
}

func (g *GPU) clear() {
	g.Instances, g.Limits, g.Allocations = nil, nil, nil
	g.ComputeMode = gpu.ComputeDefault
	g.Slice = gpu.TimeSliceUnread
	g.activate()
}

// SetComputeMode says how many processes may use a GPU.
func (n *Node) SetComputeMode(uuid string, mode gpu.ComputeMode) error {
	g, err := n.GPU(uuid)
	if err != nil {
		return err
	}
	switch {
	case g.MIG:
		return refuse(NotSupported, "the compute mode of a GPU in MIG mode is DEFAULT")
	case g.Spec().Virtual:
		return refuse(NotSupported, "the compute mode of a virtual GPU is its host's")
	case mode != gpu.ComputeDefault && mode != gpu.ComputeProhibited && mode != gpu.ComputeExclusiveProcess:
		return refuse(InvalidArgument, "%d is no compute mode", int(mode))
	}
	g.ComputeMode = mode
	return nil
}

// TimeSlice reads the time slice of a GPU. There is none for GPUs before Volta: of Pascal, NVIDIA refuses it on the
// Tesla P4 (kubernetes-sigs/dra-driver-nvidia-gpu issue 41). A vGPU and a GPU in MIG mode are taken to have none
// either, the worst that could be.
func (n *Node) TimeSlice(uuid string) (gpu.TimeSlice, error) {
	g, err := n.GPU(uuid)
	if err != nil {
		return gpu.TimeSliceUnread, err
	}
	if g.MIG || g.Spec().Virtual || !g.Spec().ComputeCapability.AtLeast(7, 0) {
		return gpu.TimeSliceUnread, refuse(NotSupported, "GPU %s has no time slice", g.PCIBusID)
	}
	return cmp.Or(g.Slice, gpu.TimeSliceDefault), nil
}

// SetTimeSlice sets the time slice of a GPU, also while it is used.
func (n *Node) SetTimeSlice(uuid string, slice gpu.TimeSlice) error {
	if !slices.Contains(gpu.TimeSlices(), slice) {
		return refuse(InvalidArgument, "%q is no time slice", slice)
	}
	if _, err := n.TimeSlice(uuid); err != nil {
		return err
	}
	g, err := n.GPU(uuid)
	if err == nil {
		g.Slice = slice
	}
	return err
}

// Open notes that a program has the driver open.
func (n *Node) Open(c Client) {
	n.Shut(c.PID)
	n.Clients = append(n.Clients, c)
}

// Shut notes that a program has closed the driver.
func (n *Node) Shut(pid int) {
	n.Clients = slices.DeleteFunc(n.Clients, func(c Client) bool { return c.PID == pid })
}

// Forget is what happens when a program has closed the driver: a GPU that nobody has open any more loses its memory
// limits and compute mode, if the node Forgets.
func (n *Node) Forget() {
	for i := range n.GPUs {
		if g := &n.GPUs[i]; n.Forgets && !g.Persistence && len(g.Processes) == 0 && !n.openByOthers(g.UUID, 0) {
			g.ComputeMode, g.Limits = gpu.ComputeDefault, nil
		}
	}
}

func (n *Node) openByOthers(uuid string, self int) bool {
	return n.DRM || slices.ContainsFunc(n.Clients, func(c Client) bool { return c.PID != self && c.Opens(uuid) })
}

// AddProcess puts a process on a GPU: on one of its GPU instances in MIG mode, else on gpu.WholeGPU.
func (n *Node) AddProcess(uuid string, p gpu.Process) error {
	g, err := n.GPU(uuid)
	if err != nil {
		return err
	}
	if p.Instance != gpu.WholeGPU {
		if _, err := g.instance(p.Instance); err != nil {
			return err
		}
	}
	g.Processes = append(g.Processes, p)
	slices.SortStableFunc(g.Processes, func(a, b gpu.Process) int { return a.PID - b.PID })
	return nil
}

// RemoveProcess ends a process on all GPUs.
func (n *Node) RemoveProcess(pid int) {
	delete(n.Cgroups.Members, pid)
	for i := range n.GPUs {
		g := &n.GPUs[i]
		g.Processes = slices.DeleteFunc(g.Processes, func(p gpu.Process) bool { return p.PID == pid })
		g.forget(func(u gpu.ProcessUse) bool { return u.PID == pid })
		g.Allocations = slices.DeleteFunc(g.Allocations, func(a Allocation) bool { return a.PID == pid })
	}
}
