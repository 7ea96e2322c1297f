// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// CreateGPUInstance creates a GPU instance at a placement; it has no compute instance yet. Without a placement (nil) it
// takes one that leaves the most room, as the driver does.
func (n *Node) CreateGPUInstance(uuid string, profile int, at *gpu.Placement) (*GPUInstance, error) {
	g, err := n.GPU(uuid)
	if err != nil {
		return nil, err
	}
	if !g.MIG {
		return nil, refuse(NotSupported, "GPU %s is not in MIG mode", g.PCIBusID)
	}
	p, ok := g.Profile(profile)
	if !ok {
		return nil, refuse(InvalidArgument, "%s has no MIG profile %d", g.Spec().Product, profile)
	}
	free := g.FreePlacements(p)
	if at == nil && len(free) > 0 {
		at = g.roomiest(p, free)
	}
	if at != nil && !possible(p, *at) {
		return nil, refuse(InvalidArgument, "%s cannot be placed at %s", p.Name, at)
	}
	if at == nil || !slices.Contains(free, *at) {
		return nil, refuse(InsufficientResources, "no room for %s on GPU %s", p.Name, g.PCIBusID)
	}
	return g.insert(GPUInstance{ID: instanceID(g.Spec(), *at), Profile: p.ID, Placement: *at}), nil
}

// instanceID numbers the placements as the driver does: 0 is the whole GPU, 1 and 2 its halves, 3 to 6 its quarters.
func instanceID(s Spec, at gpu.Placement) int {
	return s.MemorySlices/at.Size - 1 + at.Start/at.Size
}

func possible(p Profile, at gpu.Placement) bool {
	return at.Size == p.Size && slices.Contains(p.Starts, at.Start)
}

func (g *GPU) insert(i GPUInstance) *GPUInstance {
	g.Instances = append(g.Instances, i)
	slices.SortFunc(g.Instances, func(a, b GPUInstance) int { return a.Placement.Start - b.Placement.Start })
	created, _ := g.instance(i.ID)
	return created
}

// FreePlacements lists where one more instance of a profile can be created.
func (g *GPU) FreePlacements(p Profile) []gpu.Placement {
	if !g.MIG || !g.roomFor(p) {
		return nil
	}
	var free []gpu.Placement
	for _, start := range p.Starts {
		at := gpu.Placement{Start: start, Size: p.Size}
		if !slices.ContainsFunc(g.Instances, func(i GPUInstance) bool { return i.Placement.Overlaps(at) }) {
			free = append(free, at)
		}
	}
	return free
}

// RemainingCapacity is how many more instances of a profile can be created, were they all of it.
func (g *GPU) RemainingCapacity(p Profile) int {
	trial := *g
	trial.Instances = slices.Clone(g.Instances)
	count := 0
	for free := trial.FreePlacements(p); len(free) > 0; free = trial.FreePlacements(p) {
		trial.insert(GPUInstance{ID: instanceID(trial.Spec(), free[0]), Profile: p.ID, Placement: free[0]})
		count++
	}
	return count
}

// roomiest is the placement that leaves the most room for the largest profile, then for the next, and so on; the first
// of several. It is what drivers are seen to choose: on an empty A100 a 3g goes to 4:4, which leaves the 4g, and a 1g
// to 6:1 (outputs of nvidia-smi mig -lgi).
func (g *GPU) roomiest(p Profile, free []gpu.Placement) *gpu.Placement {
	bySize := slices.Clone(g.Spec().Profiles)
	slices.SortStableFunc(bySize, func(a, b Profile) int { return cmp.Or(b.Size-a.Size, b.Slices-a.Slices) })
	room := func(at gpu.Placement) (left []int) {
		trial := *g
		trial.Instances = slices.Clone(g.Instances)
		trial.insert(GPUInstance{ID: instanceID(g.Spec(), at), Profile: p.ID, Placement: at})
		for _, q := range bySize {
			left = append(left, trial.RemainingCapacity(q))
		}
		return left
	}
	best := slices.MaxFunc(free, func(a, b gpu.Placement) int { return slices.Compare(room(a), room(b)) })
	return &best
}

// roomFor checks what instances share apart from the memory slices: compute slices, the number of a profile and the
// media engines, which also are those of the largest profile.
func (g *GPU) roomFor(p Profile) bool {
	spec := g.Spec()
	sum, count := p, 1
	extended := strings.Contains(p.Name, "+me") // +me, +me.all: a GPU has one of them
	for _, i := range g.Instances {
		q, _ := g.Profile(i.Profile)
		if q.ID == p.ID {
			count++
		}
		if extended && strings.Contains(q.Name, "+me") {
			return false
		}
		sum.Slices += q.Slices
		sum.Decoders += q.Decoders
		sum.Encoders += q.Encoders
		sum.JPEGs += q.JPEGs
		sum.OFAs += q.OFAs
	}
	return sum.Slices <= spec.ComputeSlices && count <= p.Max && mediaSuffice(spec, sum)
}

func mediaSuffice(s Spec, sum Profile) bool {
	largest := s.Profiles[0]
	for _, p := range s.Profiles {
		if p.Slices > largest.Slices {
			largest = p
		}
	}
	return !largest.MediaKnown || sum.Decoders <= largest.Decoders && sum.Encoders <= largest.Encoders &&
		sum.JPEGs <= largest.JPEGs && sum.OFAs <= largest.OFAs
}

func (g *GPU) instance(id int) (*GPUInstance, error) {
	i := slices.IndexFunc(g.Instances, func(i GPUInstance) bool { return i.ID == id })
	if i < 0 {
		return nil, refuse(NotFound, "no GPU instance %d on GPU %s", id, g.PCIBusID)
	}
	return &g.Instances[i], nil
}

// DestroyGPUInstance destroys a GPU instance that has no compute instance left.
func (n *Node) DestroyGPUInstance(uuid string, id int) error {
	g, err := n.GPU(uuid)
	if err != nil {
		return err
	}
	i, err := g.instance(id)
	if err != nil {
		return err
	}
	if len(i.Compute) > 0 {
		return refuse(InUse, "GPU instance %d has compute instances", id)
	}
	if err := g.idle(id); err != nil {
		return err
	}
	g.Instances = slices.DeleteFunc(g.Instances, func(i GPUInstance) bool { return i.ID == id })
	return nil
}

func (g *GPU) idle(instance int) error {
	for _, p := range g.Processes {
		if p.Instance == instance {
			return refuse(InUse, "process %d (%s) uses GPU instance %d", p.PID, p.Name, instance)
		}
	}
	return nil
}

// unheld says which program has a handle to a compute instance. Such a program is not among the processes.
func (n *Node) unheld(i *GPUInstance, id int) error {
	for _, c := range i.Compute {
		held := func(client Client) bool { return slices.Contains(client.Instances, c.UUID) }
		if c.ID == id && slices.ContainsFunc(n.Clients, held) {
			return refuse(InUse, "another program has a handle to MIG device %s", c.UUID)
		}
	}
	return nil
}

// CreateComputeInstance creates a compute instance of so many slices at the first that are free.
func (n *Node) CreateComputeInstance(uuid string, instance, slicesWanted int) (*ComputeInstance, error) {
	g, err := n.GPU(uuid)
	if err != nil {
		return nil, err
	}
	i, err := g.instance(instance)
	if err != nil {
		return nil, err
	}
	p, _ := g.Profile(i.Profile)
	if slicesWanted < 1 || slicesWanted > p.Slices {
		return nil, refuse(NotSupported, "a compute instance of %s has 1 to %d slices, not %d", p.Name, p.Slices, slicesWanted)
	}
	start, ok := i.firstFree(slicesWanted, p.Slices)
	if !ok {
		return nil, refuse(InsufficientResources, "no %d compute slices are free in GPU instance %d", slicesWanted, instance)
	}
	i.Compute = append(i.Compute, ComputeInstance{ID: i.freeComputeID(), Start: start, Slices: slicesWanted, UUID: n.newUUID("MIG")})
	slices.SortFunc(i.Compute, func(a, b ComputeInstance) int { return a.Start - b.Start })
	at := slices.IndexFunc(i.Compute, func(c ComputeInstance) bool { return c.Start == start })
	return &i.Compute[at], nil
}

// CreatePartial creates a GPU instance whose compute instance has so many slices; with 0 it has none.
func (n *Node) CreatePartial(uuid, profile string, at gpu.Placement, computeSlices int) error {
	p, err := n.profileNamed(uuid, profile)
	if err != nil {
		return err
	}
	i, err := n.CreateGPUInstance(uuid, p.ID, &at)
	if err != nil || computeSlices == 0 {
		return err
	}
	_, err = n.CreateComputeInstance(uuid, i.ID, computeSlices)
	return err
}

func (i *GPUInstance) firstFree(want, total int) (start int, ok bool) {
	for start := 0; start+want <= total; start++ {
		at := gpu.Placement{Start: start, Size: want}
		taken := slices.ContainsFunc(i.Compute, func(c ComputeInstance) bool {
			return at.Overlaps(gpu.Placement{Start: c.Start, Size: c.Slices})
		})
		if !taken {
			return start, true
		}
	}
	return 0, false
}

func (i *GPUInstance) freeComputeID() int {
	id := 0
	for slices.ContainsFunc(i.Compute, func(c ComputeInstance) bool { return c.ID == id }) {
		id++
	}
	return id
}

// DestroyComputeInstance destroys a compute instance that nobody uses.
func (n *Node) DestroyComputeInstance(uuid string, instance, id int) error {
	g, err := n.GPU(uuid)
	if err != nil {
		return err
	}
	i, err := g.instance(instance)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(i.Compute, func(c ComputeInstance) bool { return c.ID == id }) {
		return refuse(NotFound, "no compute instance %d in GPU instance %d", id, instance)
	}
	if err := errors.Join(g.idle(instance), n.unheld(i, id)); err != nil {
		return err
	}
	i.Compute = slices.DeleteFunc(i.Compute, func(c ComputeInstance) bool { return c.ID == id })
	return nil
}
