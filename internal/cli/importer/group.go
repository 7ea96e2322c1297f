// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// group is nodes that are shared alike.
type group struct {
	name      string
	sharing   v1alpha1.Sharing
	nodes     []*cluster.Node
	notes     []string
	byDefault bool // no label chose it for any of them
}

// join puts a node to those that are shared alike.
func join(groups []*group, f found) []*group {
	at := slices.IndexFunc(groups, func(g *group) bool {
		return g.name == f.name && equality.Semantic.DeepEqual(g.sharing, f.sharing)
	})
	if at < 0 {
		at = len(groups)
		groups = append(groups, &group{name: f.name, sharing: f.sharing, byDefault: true})
	}
	g := groups[at]
	g.nodes, g.byDefault = append(g.nodes, f.node), g.byDefault && f.byDefault
	for _, note := range f.notes {
		if !slices.Contains(g.notes, note) {
			g.notes = append(g.notes, note)
		}
	}
	return groups
}

// maxValues is how many host names one policy can list.
const maxValues = 64

// policiesOf writes a policy for each group, or several where the nodes can be listed only and are many. Each has a
// name that no policy has yet, since kubectl apply would replace that policy.
func policiesOf(groups []*group, all []cluster.Node, existing []v1alpha1.GPUSharingPolicy) []Policy {
	var policies []Policy
	taken := map[string]bool{}
	for i := range existing {
		taken[existing[i].Name] = true
	}
	for _, g := range groups {
		selectors := g.selectors(all)
		for i, selector := range selectors {
			name := nameOf(g.name)
			if len(selectors) > 1 {
				name = fmt.Sprintf("%s-%d", name, i+1)
			}
			notes := g.notes
			if len(selector.MatchExpressions) > 0 {
				notes = append(slices.Clip(notes), "no label that lasts tells these nodes from the other GPU nodes, so the policy names them; to "+
					"select nodes that join later too, give all of them a label and select by it")
			}
			if slices.ContainsFunc(existing, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == name }) {
				notes = append(slices.Clip(notes), fmt.Sprintf("a policy %s exists already, so this one has another name", name))
			}
			for n, base := 2, name; taken[name]; n++ {
				name = fmt.Sprintf("%s-%d", base, n)
			}
			taken[name] = true
			policies = append(policies, Policy{
				Name: name, Notes: notes, Spec: v1alpha1.GPUSharingPolicySpec{NodeSelector: selector, Sharing: g.sharing},
			})
		}
	}
	return policies
}

// nameOf makes the name of a policy of that of a key or a layout.
func nameOf(s string) string {
	const most = 40
	name := regexp.MustCompile(`[^a-z0-9.]+`).ReplaceAllString(strings.ToLower(s), "-")
	name = strings.Trim(regexp.MustCompile(`[-.]*\.[-.]*`).ReplaceAllString(name, "."), "-.")
	return cmp.Or(strings.TrimRight(name[:min(len(name), most)], "-."), "shared")
}

// selectors select the nodes of a group and no other GPU node: all of them, by a label that they share, or by name.
func (g *group) selectors(all []cluster.Node) []*v1alpha1.NodeSelector {
	if g.byDefault && len(g.nodes) == len(all) {
		return []*v1alpha1.NodeSelector{{}}
	}
	if name, value, found := g.label(all); found {
		return []*v1alpha1.NodeSelector{{MatchLabels: map[string]string{name: value}}}
	}
	var names []string
	for _, n := range g.nodes {
		names = append(names, cmp.Or(n.Labels[labelHostname], n.Name))
	}
	var selectors []*v1alpha1.NodeSelector
	for some := range slices.Chunk(names, maxValues) {
		selectors = append(selectors, &v1alpha1.NodeSelector{MatchExpressions: []v1alpha1.NodeSelectorRequirement{{
			Key: labelHostname, Operator: "In", Values: some,
		}}})
	}
	return selectors
}

// label is a label that the nodes of the group have in common and no other GPU node has: one that a person or a node
// pool gave, never one that sharing writes.
func (g *group) label(all []cluster.Node) (name, value string, found bool) {
	candidates := slices.Collect(maps.Keys(g.nodes[0].Labels))
	slices.SortFunc(candidates, func(a, b string) int { return cmp.Or(cmp.Compare(rank(a), rank(b)), strings.Compare(a, b)) })
	for _, name := range candidates {
		value := g.nodes[0].Labels[name]
		if rank(name) == never || len(name) > maxKey || !g.separated(all, name, value) {
			continue
		}
		return name, value, true
	}
	return "", "", false
}

func (g *group) separated(all []cluster.Node, name, value string) bool {
	have := 0
	for i := range all {
		if v, has := all[i].Labels[name]; has && v == value {
			have++
		}
	}
	shared := func(n *cluster.Node) bool { v, has := n.Labels[name]; return has && v == value }
	return have == len(g.nodes) && !slices.ContainsFunc(g.nodes, func(n *cluster.Node) bool { return !shared(n) })
}

// maxKey is the longest key of a label that is told.
const maxKey = 100

// never is the rank of labels that no policy may select by, or that name one node.
const never = 9

// pools are the labels that name a node pool: its nodes of tomorrow have them too.
var pools = []string{
	"karpenter.sh/nodepool", "eks.amazonaws.com/nodegroup", "alpha.eksctl.io/nodegroup-name", "cloud.google.com/gke-nodepool", "kubernetes.azure.com/agentpool",
}

// clouds are domains of which all other labels say what a machine is today, and another of the pool may be tomorrow.
var clouds = []string{"karpenter.sh", "karpenter.k8s.aws", "karpenter.azure.com", "eks.amazonaws.com", "alpha.eksctl.io", "k8s.amazonaws.com", "cloud.google.com", "kubernetes.azure.com"}

// rank says how good a label is to select by: node pools come first, then those that people give and roles, then what
// the machine is.
func rank(name string) int {
	domain, local, has := strings.Cut(name, "/")
	switch {
	case slices.Contains(pools, name):
		return 0
	case !has && ephemeral(name), has && ephemeral(local), slices.Contains(clouds, domain):
		return never
	case !has:
		return 1
	case unfit(domain):
		return never
	case domain == "node-role.kubernetes.io":
		return 3
	case name == "node.kubernetes.io/instance-type":
		return 4
	case domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") || strings.HasSuffix(domain, "k8s.io"):
		return never
	}
	return 2
}

// unfit reports whether all labels of a domain are written by programs: about GPUs, by the operator itself, or about
// places.
func unfit(domain string) bool {
	return domain == "nvidia.com" || strings.HasSuffix(domain, ".nvidia.com") || domain == v1alpha1.Group ||
		domain == "feature.node.kubernetes.io" || strings.HasPrefix(domain, "topology.") || strings.Contains(domain, "csi.")
}

// ephemeral reports whether a label tells one machine from another, or where it stands, or what state it is in. The
// next machine of the same kind has another value.
func ephemeral(local string) bool {
	words := strings.FieldsFunc(strings.ToLower(local), func(r rune) bool { return r == '-' || r == '.' || r == '_' })
	return slices.ContainsFunc(words, func(word string) bool {
		return slices.Contains([]string{
			"zone", "region", "rack", "host", "hostname", "nodename", "nodeclaim", "machine", "instanceid", "id", "uid", "uuid", "ip",
			"version", "revision", "hash", "image", "registered", "initialized",
		}, word)
	})
}
