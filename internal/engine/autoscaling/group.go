// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"cmp"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

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
