// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package advice decides from what containers have used which ways to share GPUs fit them, and writes a policy for the
// best. It is pure.
//
//	what was observed, nodes, policies → Of → Advice for the nodes of one policy with GPUs of one product → Text
//
// What is advised makes no running pod unschedulable when it is started again, and is never less safe than what it
// replaces: the criteria, each with its reason, are in docs/choosing.md. A value that was not observed is nil, and then
// no criterion counts it as 0.
package advice

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Cluster is what advice is decided from.
type Cluster struct {
	Nodes    []cluster.Node
	Policies []v1alpha1.GPUSharingPolicy
	// Plugin is how NVIDIA's device plugin is installed.
	Plugin cluster.DevicePlugin
	Seen   Seen
	// MinAge is how long a node must have been observed at the least.
	MinAge time.Duration
	Scope  Scope

	advised  []string        // names of the policies that were advised already
	observed map[string]bool // workloads of which a pod was observed
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
	// Past are pods that asked for MIG instances, until a time: what kube-state-metrics told Prometheus.
	Past  []PastPod
	Until time.Time
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
	Policy     string          // empty: none
	Nodes      []*cluster.Node // by name
	Device     gpu.Device
	GPUs       int
	Time       time.Duration // the shortest for which one of the nodes was observed
	Concurrent int
	Containers []Container // of the scope
	// Others are the namespaces of further containers on the nodes, which the scope leaves out.
	Others []string

	// present is how the policy shares the GPUs; without a strategy: no policy does, and they are whole.
	present v1alpha1.Sharing
	// held is at most how many GPUs, instances and replicas were held at the same time on each node.
	held map[string]int
	// requests is what the pods on each node request; 0: pods that have ended may have requested it.
	requests map[string]map[string]int64
	// pods are those on the nodes that request GPUs, by namespace/name.
	pods map[string]*cluster.Pod
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
	// OnDemand is what layouts that follow demand would have done; empty: nobody knows.
	OnDemand string
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
		a := c.advise(f)
		a.OnDemand, a.Source, a.Lacks = c.onDemand(f), c.Seen.Source, append(lacks, a.Lacks...)
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
	c.observed = c.workloads()
	ranking := policy.Rank(c.Policies)
	var left leftOut
	nodes := slices.SortedFunc(slices.Values(c.Nodes), func(a, b cluster.Node) int { return cmp.Compare(a.Name, b.Name) })
	for i := range nodes {
		n := &nodes[i]
		by, devices := n.GPU.Spec.PolicyName, n.GPU.Status.Devices
		if !c.inScope(n) || len(devices) == 0 {
			continue
		}
		seen := c.Seen.Time[n.Name]
		switch {
		case mixed(n):
			left.several = append(left.several, n.Name)
			continue
		case c.lags(n, ranking):
			left.lagging = append(left.lagging, n.Name)
			continue
		case by == "" && c.sharedByHand(n):
			left.byHand = append(left.byHand, n.Name)
			continue
		case seen == 0 || seen < c.MinAge:
			left.young = append(left.young, fmt.Sprintf("%s (%s)", n.Name, long(seen)))
			continue
		}
		at := slices.IndexFunc(groups, func(f Fleet) bool { return f.Policy == by && f.Device.Product == devices[0].Product })
		if at < 0 {
			groups, at = append(groups, c.fleet(by, devices, seen)), len(groups)
		}
		groups[at].add(n, seen, c)
	}
	slices.SortStableFunc(groups, func(a, b Fleet) int { return cmp.Compare(a.Policy, b.Policy) })
	return groups, left.lacks(c.MinAge)
}

// lags reports whether another policy governs a node than the one that it is as: it waits for its change, or refuses the policy. A policy that
// is advised for it would conflict.
func (c Cluster) lags(n *cluster.Node, ranking policy.Ranking) bool {
	by := ranking.Govern(c.wouldBe(n)).By
	return by != nil && by.Name != n.GPU.Spec.PolicyName
}

// inScope reports whether advice was asked for about a node.
func (c Cluster) inScope(n *cluster.Node) bool {
	return (c.Scope.Policy == "" || n.GPU.Spec.PolicyName == c.Scope.Policy) && (c.Scope.Node == "" || n.Name == c.Scope.Node)
}

// leftOut are nodes that are in no fleet, by why.
type leftOut struct{ young, several, byHand, lagging []string }

// lacks says why they are in none.
func (l leftOut) lacks(minAge time.Duration) (lacks []string) {
	for _, of := range []struct {
		why   string
		nodes []string
	}{
		{fmt.Sprintf("nodes that were observed for less than --min-age %s", long(minAge)), l.young},
		{"nodes with GPUs of several products, for which no advice is given", l.several},
		{"nodes that are shared by hand; apply what `kubectl gpusharing import` prints first", l.byHand},
		{"nodes that are not in the desired state of their policy; `kubectl gpusharing status` says why", l.lagging},
	} {
		if len(of.nodes) > 0 {
			lacks = append(lacks, of.why+": "+format.List(of.nodes))
		}
	}
	return lacks
}

// fleet is one without nodes.
func (c Cluster) fleet(by string, devices []v1alpha1.DeviceStatus, seen time.Duration) Fleet {
	f := Fleet{
		Policy: by, Device: empty(devices), Time: seen, held: map[string]int{}, requests: map[string]map[string]int64{}, pods: map[string]*cluster.Pod{},
	}
	if p := c.policy(by); p != nil {
		f.present = p.Spec.Sharing
	}
	return f
}

func (c Cluster) policy(name string) *v1alpha1.GPUSharingPolicy {
	at := slices.IndexFunc(c.Policies, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == name })
	if at < 0 || name == "" {
		return nil
	}
	return &c.Policies[at]
}

// offeredBy are the resources of GPUs that a node offers now.
func (c Cluster) offeredBy(n *cluster.Node) map[string]int64 {
	return n.OfferedGPUs(c.Plugin.StackOf(n))
}

// sharedByHand reports whether a node that no policy governs offers anything else than its whole GPUs.
func (c Cluster) sharedByHand(n *cluster.Node) bool {
	divided := func(d v1alpha1.DeviceStatus) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled }
	offered := c.offeredBy(n)
	return slices.ContainsFunc(n.GPU.Status.Devices, divided) || len(offered) > 1 ||
		len(offered) == 1 && (offered[plan.ResourceGPU] == 0 || offered[plan.ResourceGPU] > int64(len(n.GPU.Status.Devices)))
}

// wouldBe is a node as a policy sees it.
func (c Cluster) wouldBe(n *cluster.Node) policy.Node {
	as := policy.Node{
		Name: n.Name, Labels: n.Labels, Devices: plan.WithProfiles(n.GPU.Status.Devices), Stack: c.Plugin.StackOf(n), Workload: c.Plugin.Workload(),
	}
	as.Shares, _ = n.Published.Shares()
	return as
}

// mixed reports whether the node has GPUs of several products.
func mixed(n *cluster.Node) bool {
	devices := n.GPU.Status.Devices
	return len(devices) > 0 && hasOther(n, devices[0].Product)
}

// hasOther reports whether the node has GPUs of another product.
func hasOther(n *cluster.Node, product string) bool {
	return slices.ContainsFunc(n.GPU.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return d.Product != product })
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
	if len(d.Profiles) == 0 {
		known := devices[0]
		known.ProfilesUnknown = false
		d.Profiles = plan.Devices([]v1alpha1.DeviceStatus{known})[0].Profiles
	}
	return gpu.Device{
		Product: d.Product, MemoryMiB: d.MemoryMiB, ComputeCapability: d.ComputeCapability, Virtual: d.Virtual, MIGCapable: d.MIGCapable,
		Profiles: d.Profiles,
	}
}

// try finds out what each node would offer under an option.
func (c Cluster) try(f Fleet, o *Option) {
	o.offers, o.refused = map[string]policy.Desired{}, map[string]string{}
	p := v1alpha1.GPUSharingPolicy{}
	if present := c.policy(f.Policy); present != nil {
		present.Spec.DeepCopyInto(&p.Spec)
	}
	p.Name, p.Spec.Sharing = f.Policy, o.Sharing
	for _, n := range f.Nodes {
		want, err := policy.DesiredState(&p, c.wouldBe(n))
		published, needed, other := n.OtherShares(o.Sharing)
		switch {
		case err != nil:
			o.refused[n.Name] = err.Error()
		case other && f.Policy != "":
			o.refused[n.Name] = fmt.Sprintf("NVIDIA's DRA driver gives each GPU %d shares, and it needs %d", published, needed)
		case other:
			o.Notes = []string{fmt.Sprintf("waits until NVIDIA's DRA driver gives each GPU %d shares (docs/dra.md#set-the-number-of-shares)", needed)}
			fallthrough
		default:
			o.offers[n.Name] = want
		}
	}
}

// advise compares each option with the criteria.
func (c Cluster) advise(f Fleet) Advice {
	a := Advice{Fleet: f}
	if len(f.Containers) == 0 {
		a.NoPolicy = "no container used these GPUs in that time"
		return a
	}
	a.Options = f.options()
	for i := range a.Options {
		o := &a.Options[i]
		c.try(f, o)
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
		if f.Policy != "" {
			a.NoPolicy = fmt.Sprintf("no way to share these GPUs is known to fit all of these containers and to be as safe as policy %s, which stays as it is", f.Policy)
		}
	}
	if len(f.Device.Profiles) == 0 && f.Device.MIGCapable {
		a.Lacks = append(a.Lacks, "the MIG profiles of "+f.Device.Product+", so MIG is not considered")
	}
	return a
}
