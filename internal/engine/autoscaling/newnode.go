// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// shape is the GPUs that a new node of a group has.
type shape struct {
	product       string // of all GPUs; several products are separated by commas
	count         int
	instanceTypes []string // sorted
	devices       []v1alpha1.DeviceStatus
	// labels are what the nodes of the shape, if there are any, have in common.
	labels map[string]string
	nodes  int
	// advertised is what its last ready node advertised.
	advertised map[string]int64
	// by is the policy that reported the shape, if no node shows it any more, or that declares it.
	by       string
	declared bool
}

// group is a node group with its nodes.
type group struct {
	Ref
	pool     *Pool
	scalable *Scalable
	nodes    []*cluster.Node
	starting []*cluster.Node // without a GPU label
}

// labels are what new nodes of the group have for certain: as its nodes have them or, if it has none, as they had them and as its object
// tells. Karpenter gives new nodes the labels of the NodePool, whatever its nodes have.
func (g *group) labels(of *shape) map[string]string {
	switch {
	case g.pool != nil:
		return withAll(g.pool.Labels, of.labels)
	case of.nodes == 0 && g.scalable != nil:
		return withAll(withAll(g.scalable.shown(), g.scalable.Labels), pairsIn(g.scalable.theirs(annotationLabels)))
	}
	return of.labels
}

// hardware is the GPUs that the nodes of the cluster show, by product.
type hardware map[string]v1alpha1.DeviceStatus

// fresh is a GPU as a new node has it: nothing is changed on it, and nobody uses it.
func fresh(d v1alpha1.DeviceStatus, index int) v1alpha1.DeviceStatus {
	d.UUID, d.Index = fmt.Sprintf("GPU-%d", index), int32(index)
	d.Sharing = v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}
	d.ComputeMode, d.PendingMIGMode = v1alpha1.ComputeModeDefault, ""
	d.Instances, d.Processes, d.Holders, d.ResetPeers = nil, nil, nil, nil
	d.ProfilesUnknown = false // a driver that tells them in MIG mode only will tell those of the catalogue
	return d
}

// gpus are count GPUs of a product. known is false if nobody knows the GPU, so that its MIG profiles are not known
// either. It then stands for a GPU of compute capability 7.5 or newer, which serves as many MPS clients as any.
func (h hardware) gpus(product string, count int) (devices []v1alpha1.DeviceStatus, known bool) {
	one, known := h[product]
	if !known {
		d, listed := catalogue.Find(product)
		known = listed
		one = v1alpha1.DeviceStatus{
			Product: product, MemoryMiB: d.MemoryMiB, ComputeCapability: d.ComputeCapability.String(), Virtual: d.Virtual, MIGCapable: d.MIGCapable,
		}
		if !listed {
			one.ComputeCapability = "7.5"
		}
	}
	for i := range count {
		devices = append(devices, fresh(one, i))
	}
	return devices, known
}

// shapes are the shapes of a group: those that its nodes show, then those that a status remembers, then those that
// policies declare. A shape is for instance types, and the first source of an instance type counts. ambiguous is why
// one node group would have nodes that differ, though its autoscaler takes them for alike. doubts are what agents report
// and nobody confirms.
func (s *Snapshot) shapes(g *group, known hardware, ranking policy.Ranking) (all []shape, ambiguous string, doubts []string) {
	all, ambiguous, doubts = s.live(g, known, ranking)
	if ambiguous != "" {
		return nil, ambiguous, doubts
	}
	isPool := g.Kind == v1alpha1.NodeGroupNodePool
	if len(all) == 0 || isPool {
		all = add(all, s.reportedShapes(g.Ref, known), isPool)
	}
	if len(all) == 0 || isPool {
		all = add(all, s.declared(g, known), isPool)
	}
	for i := range all {
		if of := s.lastOf(g.Ref, &all[i]); of != nil && all[i].advertised == nil {
			all[i].advertised = countsOf(of.Advertised)
		}
	}
	if !isPool && len(all) > 1 {
		return nil, fmt.Sprintf("%s has nodes with %s", g.Ref, differing(all)), doubts
	}
	slices.SortFunc(all, func(a, b shape) int { return cmp.Or(cmp.Compare(a.product, b.product), cmp.Compare(a.count, b.count)) })
	return all, "", doubts
}

func differing(all []shape) string {
	parts := make([]string, 0, len(all))
	for _, s := range all {
		parts = append(parts, fmt.Sprintf("%d × %s", s.count, s.product))
	}
	slices.Sort(parts)
	return strings.Join(parts, " and with ")
}

// live are the shapes of nodes, one for each instance type. GPUs die, so the nodes with the most GPUs count, as far as
// others confirm them (settle). Where nobody does, the shape that a policy reported last stays.
func (s *Snapshot) live(g *group, known hardware, ranking policy.Ranking) (all []shape, ambiguous string, doubts []string) {
	byType := map[string][]*cluster.Node{}
	for _, n := range g.nodes {
		if len(n.GPU.Status.Devices) > 0 {
			byType[n.Labels[labelInstanceType]] = append(byType[n.Labels[labelInstanceType]], n)
		}
	}
	for _, instanceType := range slices.Sorted(maps.Keys(byType)) {
		nodes := byType[instanceType]
		last := s.lastOfType(g.Ref, instanceType)
		is := settle(nodes, last, ranking)
		if is.ambiguous {
			return nil, fmt.Sprintf("nodes of instance type %q have %s", instanceType, format.Join(productsOf(nodes))), doubts
		}
		if doubt := is.doubt(g); doubt != "" {
			doubts = append(doubts, doubt)
		}
		s := shape{nodes: len(nodes), labels: maps.Clone(shapeLabels(nodes))}
		switch {
		case is.claim != nil:
			s.product, s.count, s.devices = is.claim.product, is.claim.count, is.claim.devices
		case last != nil:
			s.product, s.count = last.Product, int(last.GPUsPerNode)
			s.devices, _ = known.gpus(s.product, s.count)
		default:
			continue
		}
		delete(s.labels, "kubernetes.io/hostname")
		if instanceType != "" {
			s.instanceTypes = []string{instanceType}
		}
		for _, n := range nodes {
			if lists := advertised(n); len(lists) > 0 {
				s.advertised = lists
			}
		}
		all = add(all, []shape{s}, true)
	}
	return all, "", doubts
}

// lastOfType is what a policy reported last of the nodes of a group that have an instance type, or none; nil: nothing.
func (s *Snapshot) lastOfType(of Ref, instanceType string) *v1alpha1.NodeGroupStatus {
	for i := range s.Policies {
		all := s.Policies[i].Status.NodeGroups
		for j := range all {
			s := &all[j]
			if of.is(s.Kind, s.Namespace, s.Name) && s.Product != "" && s.GPUsPerNode > 0 && !strings.Contains(s.Product, ",") &&
				(slices.Contains(s.InstanceTypes, instanceType) || instanceType == "" && len(s.InstanceTypes) == 0) {
				return s
			}
		}
	}
	return nil
}

// productsOf are the products of the GPUs of nodes, in their order, those of one node by comma.
func productsOf(nodes []*cluster.Node) []string {
	var all []string
	for _, n := range nodes {
		if product := productOf(n); !slices.Contains(all, product) {
			all = append(all, product)
		}
	}
	return all
}

// productOf names the products of the GPUs of a node.
func productOf(n *cluster.Node) string {
	devices := n.GPU.Status.Devices
	first := devices[0].Product
	if !slices.ContainsFunc(devices, func(d v1alpha1.DeviceStatus) bool { return d.Product != first }) {
		return first
	}
	var products []string
	for i := range devices {
		products = append(products, devices[i].Product)
	}
	slices.Sort(products)
	return strings.Join(slices.Compact(products), ",")
}

// add adds shapes to others: as further instance types of one that has the same GPUs, without those that are known.
// Groups whose nodes are all alike have no use for instance types: there the first source counts.
func add(all, more []shape, byType bool) []shape {
	for _, s := range more {
		named := len(s.instanceTypes) > 0
		if byType {
			s.instanceTypes = slices.DeleteFunc(slices.Clone(s.instanceTypes), func(t string) bool {
				return slices.ContainsFunc(all, func(o shape) bool { return slices.Contains(o.instanceTypes, t) })
			})
		}
		at := slices.IndexFunc(all, func(o shape) bool { return o.product == s.product && o.count == s.count })
		if at < 0 {
			if !named || len(s.instanceTypes) > 0 {
				all = append(all, s)
			}
			continue
		}
		same := &all[at]
		same.instanceTypes = append(same.instanceTypes, s.instanceTypes...)
		slices.Sort(same.instanceTypes)
		same.instanceTypes = slices.Compact(same.instanceTypes)
		if s.nodes > 0 && same.nodes > 0 {
			same.labels = common(same.labels, s.labels)
		}
		same.nodes += s.nodes
		if len(same.advertised) == 0 {
			same.advertised = s.advertised
		}
	}
	return all
}

func common(a, b map[string]string) map[string]string {
	both := map[string]string{}
	for k, v := range a {
		if other, found := b[k]; found && other == v {
			both[k] = v
		}
	}
	return both
}

// reportedShapes are the shapes that policies reported of a group.
func (s *Snapshot) reportedShapes(of Ref, known hardware) []shape {
	var all []shape
	for i := range s.Policies {
		p := &s.Policies[i]
		for j := range p.Status.NodeGroups {
			s := &p.Status.NodeGroups[j]
			if of.is(s.Kind, s.Namespace, s.Name) && s.Product != "" && s.GPUsPerNode > 0 && !strings.Contains(s.Product, ",") &&
				len(s.Advertised) > 0 {
				devices, _ := known.gpus(s.Product, int(s.GPUsPerNode))
				all = add(all, []shape{{
					product: s.Product, count: int(s.GPUsPerNode), instanceTypes: s.InstanceTypes, devices: devices, by: p.Name,
					advertised: countsOf(s.Advertised),
				}}, true)
			}
		}
	}
	return all
}

// lastOf is what a policy reported of a shape of a group last.
func (s *Snapshot) lastOf(of Ref, like *shape) *v1alpha1.NodeGroupStatus {
	for i := range s.Policies {
		all := s.Policies[i].Status.NodeGroups
		for j := range all {
			if of.is(all[j].Kind, all[j].Namespace, all[j].Name) && all[j].Product == like.product && int(all[j].GPUsPerNode) == like.count {
				return &all[j]
			}
		}
	}
	return nil
}

// declared are the shapes that policies declare for a group.
func (s *Snapshot) declared(g *group, known hardware) []shape {
	var all []shape
	for i := range s.Policies {
		p := &s.Policies[i]
		for _, d := range p.Spec.Autoscaling.NodeShapes {
			if !slices.ContainsFunc(d.NodeGroups, func(r v1alpha1.NodeGroupReference) bool { return g.is(r.Kind, r.Namespace, r.Name) }) {
				continue
			}
			devices, _ := known.gpus(d.Product, int(d.GPUsPerNode))
			types := d.InstanceTypes
			if len(types) == 0 && g.pool != nil {
				types = g.pool.InstanceTypes
			}
			all = add(all, []shape{{
				product: d.Product, count: int(d.GPUsPerNode), instanceTypes: slices.Sorted(slices.Values(types)), devices: devices, by: p.Name, declared: true,
			}}, true)
		}
	}
	return all
}

// is reports whether the group has this kind and name.
func (r Ref) is(kind v1alpha1.NodeGroupKind, namespace, name string) bool {
	return r.Kind == kind && r.Namespace == namespace && r.Name == name
}

func countsOf(all []v1alpha1.NodeResource) map[string]int64 {
	counts := map[string]int64{}
	for _, r := range all {
		counts[r.Name] = r.Count
	}
	return counts
}

// groups are the node groups of the cluster with their nodes, by kind and name. A group without an object is known by
// its nodes, or because a policy reported it or declares it.
func (s *Snapshot) groups() []*group {
	all := map[Ref]*group{}
	named := func(r Ref) *group {
		if all[r] == nil {
			all[r] = &group{Ref: r}
		}
		return all[r]
	}
	for i := range s.Pools {
		named(Ref{Group: GroupKarpenter, Kind: v1alpha1.NodeGroupNodePool, Name: s.Pools[i].Name}).pool = &s.Pools[i]
	}
	owner := map[Ref]*Ref{}
	for i := range s.Scalables {
		s := &s.Scalables[i]
		if s.Owner != nil {
			owner[s.Ref] = s.Owner
			continue
		}
		named(s.Ref).scalable = s
	}
	of := func(n *cluster.Node) (Ref, bool) {
		r, found := s.groupOf(n)
		if by := owner[r]; by != nil {
			r = *by
		}
		return r, found
	}
	for i := range s.Nodes {
		if r, found := of(&s.Nodes[i]); found {
			g := named(r)
			g.nodes = append(g.nodes, &s.Nodes[i])
		}
	}
	for _, r := range s.clouds() {
		named(r)
	}
	for i := range s.Starting {
		if r, found := of(&s.Starting[i]); found && all[r] != nil {
			all[r].starting = append(all[r].starting, &s.Starting[i])
		}
	}
	sorted := make([]*group, 0, len(all))
	for _, g := range all {
		sorted = append(sorted, g)
	}
	slices.SortFunc(sorted, func(a, b *group) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Group, b.Group))
	})
	return sorted
}

// clouds are the groups of clouds that policies reported or declare.
func (s *Snapshot) clouds() []Ref {
	var all []Ref
	add := func(kind v1alpha1.NodeGroupKind, name string) {
		if isCloud(kind) {
			all = append(all, Ref{Kind: kind, Name: name})
		}
	}
	for i := range s.Policies {
		p := &s.Policies[i]
		for j := range p.Status.NodeGroups {
			add(p.Status.NodeGroups[j].Kind, p.Status.NodeGroups[j].Name)
		}
		for _, s := range p.Spec.Autoscaling.NodeShapes {
			for _, r := range s.NodeGroups {
				add(r.Kind, r.Name)
			}
		}
	}
	return all
}

func isCloud(kind v1alpha1.NodeGroupKind) bool {
	return kind == v1alpha1.NodeGroupEKS || kind == v1alpha1.NodeGroupAKS || kind == v1alpha1.NodeGroupGKE
}

// How long the name of an object and that of a namespace are at most. An annotation may have anything.
const longestName, longestNamespace = 253, 63

// groupOf is the group that a node belongs to.
func (s *Snapshot) groupOf(n *cluster.Node) (Ref, bool) {
	if name := n.Labels[labelNodePool]; name != "" {
		return Ref{Group: GroupKarpenter, Kind: v1alpha1.NodeGroupNodePool, Name: name}, true
	}
	if machine := n.Annotations[annotationOpenShift]; machine != "" {
		namespace, name, found := strings.Cut(s.MachineSets[machine], "/")
		return Ref{Group: GroupOpenShift, Kind: v1alpha1.NodeGroupMachineSet, Namespace: namespace, Name: name}, found
	}
	if name := n.Annotations[annotationCAPIOwner]; name != "" && len(name) <= longestName && len(n.Annotations[annotationCAPINamespace]) <= longestNamespace &&
		n.Annotations[annotationCAPIKind] == string(v1alpha1.NodeGroupMachineSet) {
		return Ref{
			Group: GroupClusterAPI, Kind: v1alpha1.NodeGroupMachineSet, Namespace: n.Annotations[annotationCAPINamespace], Name: name,
		}, true
	}
	for label, kind := range map[string]v1alpha1.NodeGroupKind{
		labelEKS: v1alpha1.NodeGroupEKS, labelAKS: v1alpha1.NodeGroupAKS, labelGKE: v1alpha1.NodeGroupGKE,
	} {
		if name := n.Labels[label]; name != "" {
			return Ref{Kind: kind, Name: name}, true
		}
	}
	return Ref{}, false
}
