// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package usage turns a sample of the GPUs of a node into who uses what: each GPU and MIG instance with its containers,
// what each uses and the share that the node's sharing means it to have. A value that is not known is nil, never 0. It
// is pure.
package usage

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Path is where an agent serves its Report, beside the metrics.
const Path = "/usage"

// TokenHeader is the header in which the agents take a token that comes through the API server's proxy, which removes
// Authorization.
const TokenHeader = "Gpusharing-Token"

// Report is how the GPUs of a node are used. The agents serve it as JSON.
type Report struct {
	Node   string `json:"node"`
	Policy string `json:"policy,omitempty"` // that governs the node
	// Units are the GPUs by index, each followed by its MIG instances by id.
	Units []Unit `json:"units"`
	// Daemons are the MPS control daemons of the operator, by resource.
	Daemons []Daemon `json:"daemons,omitempty"`
	// Incomplete is why GPUs are missing; empty: none is.
	Incomplete string `json:"incomplete,omitempty"`
}

// Unit is a GPU, or one of its MIG instances.
type Unit struct {
	GPU         string            `json:"gpu"` // UUID
	Index       int               `json:"index"`
	Product     string            `json:"product,omitempty"`
	Instance    *int              `json:"instance,omitempty"` // id of the GPU instance; nil: the whole GPU
	Profile     string            `json:"profile,omitempty"`  // of the instance
	Partitioned bool              `json:"partitioned,omitempty"`
	Strategy    v1alpha1.Strategy `json:"strategy"` // empty: not known, as while the device plugin restarts
	Memory      *gpu.Memory       `json:"memory,omitempty"`
	Utilization *gpu.Utilization  `json:"utilization,omitempty"` // of an instance: of its own part of the GPU
	Replicas    int               `json:"replicas"`              // that the node offers of it
	Limits      *Limits           `json:"limits,omitempty"`
	Containers  []Container       `json:"containers,omitempty"` // by use, the largest first
	// OtherBytes is the memory of processes that belong to no container that is known, such as the MPS server.
	OtherBytes int64 `json:"otherBytes,omitempty"`

	meant *int64 // the share of one replica as the policy's memory guard says; nil: it does not
}

// Limits are those of one client of the MPS server of a GPU.
type Limits struct {
	ActiveThreads float64 `json:"activeThreads"`         // 0 to 1
	MemoryBytes   *int64  `json:"memoryBytes,omitempty"` // nil: no limit
}

// Daemon is an MPS control daemon.
type Daemon struct {
	Resource        string `json:"resource"`
	Clients         int32  `json:"clients"`
	OutdatedClients int32  `json:"outdatedClients"` // that connected before the limits last changed
}

// Name names a container.
type Name struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
}

// Container is how a container uses a GPU or an instance.
type Container struct {
	Name

	MemoryBytes *int64           `json:"memoryBytes,omitempty"`
	ShareBytes  *int64           `json:"shareBytes,omitempty"`
	LimitBytes  *int64           `json:"limitBytes,omitempty"` // that the driver holds its pod to
	Utilization *gpu.Utilization `json:"utilization,omitempty"`
	Processes   int              `json:"processes"`
}

// Over reports whether a container uses more memory than its share.
func (c Container) Over() bool {
	return c.MemoryBytes != nil && c.ShareBytes != nil && *c.MemoryBytes > *c.ShareBytes
}

// Device is a GPU as it was sampled, with what the kubelet says of it.
type Device struct {
	gpu.DeviceUse

	// Holders are the containers to which the kubelet allocated it or an instance: one for each replica that a
	// container has.
	Holders []gpu.Holder
	// Replicas are how many of it, or of an instance, the kubelet can allocate, by instance. It knows of none that
	// NVIDIA's DRA driver offers.
	Replicas map[int]int
}

// limit adds the limits that the agent reports to hold: of the first pods, as the report has no more.
func (r *Report) limit(node *v1alpha1.GPUNode) {
	if node.Spec.Memory.Limited() != v1alpha1.MemoryLimitEnforce {
		return
	}
	for _, p := range node.Status.MemoryLimits.Pods {
		for i := range r.Units {
			for j := range r.Units[i].Containers {
				c := &r.Units[i].Containers[j]
				if p.Reason == "" && r.Units[i].GPU == p.DeviceUUID && c.Namespace == p.Namespace && c.Pod == p.PodName {
					c.LimitBytes = &p.LimitBytes
				}
			}
		}
	}
}

// offered is how often the node offers the GPU, or an instance: as the kubelet lists it, or as the ResourceSlices of
// NVIDIA's DRA driver show it. The driver shares whole GPUs alone, and publishes none in MIG mode.
func (d *Device) offered(instance int, known v1alpha1.DeviceStatus, shares int64) int {
	switch {
	case d.Replicas[instance] > 0 || shares == 0:
		return d.Replicas[instance]
	case instance != gpu.WholeGPU:
		return 1
	case known.Sharing.MIGMode == v1alpha1.MIGModeEnabled || len(d.Instances) > 0:
		return 0
	}
	return int(shares)
}

// Of reports on a node. owners are the containers of processes, by PID. A Name without a container is that of a pod, for
// whose container with the GPU the process counts; one that is empty is not known.
func Of(node *v1alpha1.GPUNode, devices []Device, owners map[int]Name) Report {
	r := Report{Node: node.Name, Policy: node.Spec.PolicyName, Units: []Unit{}}
	for i := range devices {
		known, shares := status(node, devices[i].UUID), node.Status.Rollout.Shares
		whole := unitOf(known, &devices[i], shares, node.Spec.Memory)
		whole.Partitioned = len(devices[i].Instances) > 0
		r.Units = append(r.Units, whole.filled(&devices[i], gpu.WholeGPU, owners))
		for _, instance := range devices[i].Instances {
			part := unitOf(known, &devices[i], shares, node.Spec.Memory)
			part.Instance, part.Memory, part.Utilization = &instance.ID, instance.Memory, instance.Utilization
			part.Profile, part.Limits, part.Strategy = profile(known, instance.UUID), nil, v1alpha1.StrategyMIG
			part.Replicas = devices[i].offered(instance.ID, known, shares)
			r.Units = append(r.Units, part.filled(&devices[i], instance.ID, owners))
		}
	}
	r.limit(node)
	slices.SortStableFunc(r.Units, func(a, b Unit) int { return a.Index - b.Index })
	for _, d := range node.Status.MPS {
		r.Daemons = append(r.Daemons, Daemon{Resource: d.ResourceName, Clients: d.Clients, OutdatedClients: d.OutdatedClients})
	}
	return r
}

// unitOf is a whole GPU.
func unitOf(known v1alpha1.DeviceStatus, d *Device, shares int64, memory *v1alpha1.TimeSlicedMemory) Unit {
	u := Unit{
		GPU: d.UUID, Index: d.Index, Product: known.Product, Memory: d.Memory, Utilization: d.Utilization,
		Replicas: d.offered(gpu.WholeGPU, known, shares),
	}
	switch daemon := known.Sharing.MPS; {
	case known.Sharing.MIGMode == v1alpha1.MIGModeEnabled || len(d.Instances) > 0:
		u.Strategy = v1alpha1.StrategyMIG
	case daemon != nil:
		u.Strategy = v1alpha1.StrategyMPS
		u.Limits = &Limits{ActiveThreads: float64(daemon.ActiveThreadPercentage) / 100}
		if daemon.PinnedMemoryLimit != nil {
			u.Limits.MemoryBytes = new(daemon.PinnedMemoryLimit.Value())
		}
	case u.Replicas > 1:
		u.Strategy = v1alpha1.StrategyTimeSlicing
		if memory != nil && memory.PerReplica != nil {
			u.meant = new(memory.PerReplica.Value())
		}
	case u.Replicas == 1:
		u.Strategy = v1alpha1.StrategyExclusive
	}
	return u
}

// holdings are how many replicas of a unit each container holds.
type holdings map[Name]int

// containerOf is a container of a pod that is known without it: the first that holds the unit.
func (h holdings) containerOf(pod Name) Name {
	if pod.Container != "" || pod.Pod == "" {
		return pod
	}
	for _, name := range slices.SortedFunc(maps.Keys(h), compareNames) {
		if name.Namespace == pod.Namespace && name.Pod == pod.Pod {
			return name
		}
	}
	pod.Container = "unknown"
	return pod
}

// filled is the unit with who uses it.
func (u Unit) filled(d *Device, instance int, owners map[int]Name) Unit {
	held := holdings{}
	for _, h := range d.Holders {
		if h.Instance == instance {
			held[Name{h.Namespace, h.Pod, h.Container}]++
		}
	}
	containers := map[Name]*Container{}
	for name, replicas := range held {
		containers[name] = &Container{Name: name, ShareBytes: u.share(replicas)}
		if !d.ProcessesUnknown {
			containers[name].MemoryBytes = new(int64(0))
		}
	}
	unnamed := false
	for _, p := range d.Processes {
		if p.Instance != instance {
			continue
		}
		name, owned := owners[p.PID]
		name = held.containerOf(name)
		unnamed = unnamed || owned && name == (Name{})
		if name == (Name{}) {
			if p.MemoryBytes != nil {
				u.OtherBytes += *p.MemoryBytes
			}
			continue
		}
		c, found := containers[name]
		if !found {
			c = &Container{Name: name, MemoryBytes: new(int64(0)), ShareBytes: u.share(1)}
			containers[name] = c
		}
		c.add(p)
	}
	for _, c := range containers {
		if unnamed && c.Processes == 0 { // they may be its
			c.MemoryBytes = nil
		}
		u.Containers = append(u.Containers, *c)
	}
	slices.SortFunc(u.Containers, ByUse)
	return u
}

// add counts a process. What is not known of one is not known of its container.
func (c *Container) add(p gpu.ProcessUse) {
	c.Processes++
	switch {
	case p.MemoryBytes == nil || c.MemoryBytes == nil:
		c.MemoryBytes = nil
	default:
		c.MemoryBytes = new(*c.MemoryBytes + *p.MemoryBytes)
	}
	if p.Utilization == nil {
		return // NVML lists no process that did nothing, so that the others are all there is
	}
	sum := *p.Utilization
	if c.Utilization != nil {
		sum.Compute, sum.Memory = min(1, sum.Compute+c.Utilization.Compute), min(1, sum.Memory+c.Utilization.Memory)
	}
	c.Utilization = &sum
}

// share is the memory that a container with so many replicas is meant to have: what its MPS server lets it have, or the
// memory of the GPU or the instance divided by its replicas, or what the policy's memory guard says. The kubelet lists
// none while the device plugin restarts or calls the GPU unhealthy.
func (u Unit) share(replicas int) *int64 {
	if u.Limits != nil && u.Limits.MemoryBytes != nil {
		return new(*u.Limits.MemoryBytes * int64(replicas))
	}
	if u.meant != nil {
		return new(*u.meant * int64(replicas))
	}
	if u.Memory == nil || u.Replicas == 0 {
		return nil
	}
	return new(u.Memory.Total / int64(u.Replicas) * int64(min(replicas, u.Replicas)))
}

// ByUse sorts the largest memory first; what is not known comes last.
func ByUse(a, b Container) int {
	use := func(c Container) int64 {
		if c.MemoryBytes == nil {
			return -1
		}
		return *c.MemoryBytes
	}
	return cmp.Or(cmp.Compare(use(b), use(a)), compareNames(a.Name, b.Name))
}

func compareNames(a, b Name) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
}

// status is what the agent last reported of a GPU.
func status(node *v1alpha1.GPUNode, uuid string) v1alpha1.DeviceStatus {
	for _, d := range node.Status.Devices {
		if d.UUID == uuid {
			return d
		}
	}
	return v1alpha1.DeviceStatus{}
}

func profile(d v1alpha1.DeviceStatus, uuid string) string {
	for _, i := range d.Instances {
		if i.UUID == uuid {
			return i.Profile
		}
	}
	return ""
}
