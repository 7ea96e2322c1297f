// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package advice decides from what containers have used which ways to share GPUs fit them, and writes a policy for the
// best. It is pure.
//
//	what was observed, nodes, policies → Of → Advice for the nodes of one policy with GPUs of one product → Text
//
// The criteria, each with its reason, are in docs/choosing.md. A value that was not observed is nil, and then no
// criterion counts it as 0.
package advice

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Cluster is what advice is decided from.
type Cluster struct {
	Nodes    []Node
	Policies []v1alpha1.GPUSharingPolicy
	Seen     Seen
	// MinAge is how long a node must have been observed at the least.
	MinAge time.Duration
	Scope  Scope

	advised []string // names of the policies that were advised already
}

// Node is a node with GPUs.
type Node struct {
	Name   string
	Labels map[string]string
	// Policy governs the node; empty: none does.
	Policy  string
	Devices []v1alpha1.DeviceStatus
}

// Scope limits advice to the nodes of a policy, to a node, or to the containers of a namespace. Empty members limit
// nothing.
type Scope struct{ Policy, Node, Namespace string }

// Seen is what a source has observed.
type Seen struct {
	// Source names it in messages.
	Source string
	// Time is for how long each node was observed. A node that is absent was not.
	Time map[string]time.Duration
	// Concurrent is at most how many GPUs and instances, counted once for each container on them, containers of the
	// scope held at the same time on each node.
	Concurrent map[string]int
	Containers []Container
	// Lacks is what the source could not give.
	Lacks []string
}

// Container is what a container has used at most. A value that the driver did not report is nil.
type Container struct {
	usage.Name

	Node string
	// Held is how many GPUs or instances it held at the same time.
	Held        int
	MemoryBytes *int64
	// Compute and Compute95 are the largest utilization of the streaming multiprocessors of the GPU, 0 to 1, and the
	// one that 95 of 100 reported samples did not exceed.
	Compute, Compute95 *float64
}

// Fleet is the containers on nodes that one policy governs, or none, with GPUs of one product.
type Fleet struct {
	Policy     string // empty: none
	Nodes      []Node // by name
	Device     gpu.Device
	GPUs       int
	Time       time.Duration // the shortest for which one of the nodes was observed
	Concurrent int
	Containers []Container // of the scope
	// Others are the namespaces of further containers on the nodes, which the scope leaves out.
	Others []string
}

// Advice is what fits a fleet.
type Advice struct {
	Fleet   Fleet
	Options []Option
	// Best is the option that is advised; nil: none.
	Best *Option
	// Policy makes it so; nil where NoPolicy says why there is none.
	Policy   *v1alpha1.GPUSharingPolicy
	NoPolicy string
	Source   string
	Lacks    []string
}

// Of advises. Nodes that were observed for less than the minimum, or have GPUs of several products, are left out, and
// Lacks says so. Errors: no node is left.
func Of(c Cluster) ([]Advice, error) {
	groups, lacks := c.groups()
	if len(groups) == 0 {
		if len(lacks) == 0 {
			return nil, errors.New("no node with GPUs is there to advise on")
		}
		return nil, fmt.Errorf("there is nothing to advise from: %s", format.Join(lacks))
	}
	if c.Scope.Namespace != "" {
		groups = slices.DeleteFunc(groups, func(f Fleet) bool { return len(f.Containers) == 0 })
		if len(groups) == 0 {
			return nil, fmt.Errorf("no container of namespace %s used a GPU in that time", c.Scope.Namespace)
		}
	}
	lacks = append(lacks, c.Seen.Lacks...)
	advised := make([]Advice, 0, len(groups))
	for _, f := range groups {
		a := f.advise()
		a.Source, a.Lacks = c.Seen.Source, append(lacks, a.Lacks...)
		lacks = nil // it holds for the cluster, so once is enough
		if a.Best != nil {
			a.Policy, a.NoPolicy = c.policyFor(f, a.Best.Sharing)
		}
		if a.Policy != nil {
			c.advised = append(c.advised, a.Policy.Name)
		}
		advised = append(advised, a)
	}
	return advised, nil
}

// groups are the fleets by policy and product, and why nodes are left out.
func (c Cluster) groups() (groups []Fleet, lacks []string) {
	var young, mixed []string
	for _, n := range slices.SortedFunc(slices.Values(c.Nodes), func(a, b Node) int { return cmp.Compare(a.Name, b.Name) }) {
		if c.Scope.Policy != "" && n.Policy != c.Scope.Policy || c.Scope.Node != "" && n.Name != c.Scope.Node || len(n.Devices) == 0 {
			continue
		}
		seen := c.Seen.Time[n.Name]
		switch {
		case n.mixed():
			mixed = append(mixed, n.Name)
			continue
		case seen == 0 || seen < c.MinAge:
			young = append(young, fmt.Sprintf("%s (%s)", n.Name, long(seen)))
			continue
		}
		at := slices.IndexFunc(groups, func(f Fleet) bool { return f.Policy == n.Policy && f.Device.Product == n.Devices[0].Product })
		if at < 0 {
			groups, at = append(groups, Fleet{Policy: n.Policy, Device: empty(n.Devices), Time: seen}), len(groups)
		}
		groups[at].add(n, seen, c)
	}
	if len(young) > 0 {
		lacks = append(lacks, fmt.Sprintf("nodes that were observed for less than --min-age %s: %s", long(c.MinAge), format.List(young)))
	}
	if len(mixed) > 0 {
		lacks = append(lacks, "nodes with GPUs of several products, for which no advice is given: "+format.List(mixed))
	}
	slices.SortStableFunc(groups, func(a, b Fleet) int { return cmp.Compare(a.Policy, b.Policy) })
	return groups, lacks
}

// mixed reports whether the node has GPUs of several products.
func (n Node) mixed() bool {
	return slices.ContainsFunc(n.Devices, func(d v1alpha1.DeviceStatus) bool { return d.Product != n.Devices[0].Product })
}

// empty is a GPU of a product before anything is changed. Its MIG profiles are the driver's, or those of the catalogue,
// since some drivers tell them in MIG mode only.
func empty(devices []v1alpha1.DeviceStatus) gpu.Device {
	all := plan.Devices(devices)
	d := all[0]
	for i := range all {
		if len(d.Profiles) == 0 {
			d.Profiles = all[i].Profiles
		}
	}
	if known, found := catalogue.Find(d.Product); found && len(d.Profiles) == 0 {
		d.Profiles = known.Profiles
	}
	return gpu.Device{
		Product: d.Product, MemoryMiB: d.MemoryMiB, ComputeCapability: d.ComputeCapability, Virtual: d.Virtual, MIGCapable: d.MIGCapable,
		Profiles: d.Profiles,
	}
}

func (f *Fleet) add(n Node, seen time.Duration, c Cluster) {
	f.Nodes, f.GPUs, f.Time = append(f.Nodes, n), f.GPUs+len(n.Devices), min(f.Time, seen)
	f.Concurrent += c.Seen.Concurrent[n.Name]
	others := map[string]bool{}
	for _, container := range c.Seen.Containers {
		switch {
		case container.Node != n.Name:
		case c.Scope.Namespace != "" && container.Namespace != c.Scope.Namespace:
			others[container.Namespace] = true
		default:
			f.Containers = append(f.Containers, container)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(others)) {
		if !slices.Contains(f.Others, name) {
			f.Others = append(f.Others, name)
		}
	}
}

// advise compares each option with the criteria.
func (f Fleet) advise() Advice {
	a := Advice{Fleet: f}
	if len(f.Containers) == 0 {
		a.NoPolicy = "no container used these GPUs in that time"
		return a
	}
	a.Options = f.options()
	for i := range a.Options {
		o := &a.Options[i]
		for _, r := range Criteria() {
			if why := r.Against(f, *o); why == "" {
				continue
			} else if r.Note {
				o.Notes = append(o.Notes, why)
			} else {
				o.Against = append(o.Against, why)
			}
		}
		if a.Best == nil && len(o.Against) == 0 {
			a.Best = o
		}
	}
	if a.Best == nil {
		a.NoPolicy = "no way to share these GPUs fits all of these containers; give the containers that do not fit nodes of their own"
	}
	if len(f.Device.Profiles) == 0 && f.Device.MIGCapable {
		a.Lacks = append(a.Lacks, "the MIG profiles of "+f.Device.Product+", so MIG is not considered")
	}
	return a
}
