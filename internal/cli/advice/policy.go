// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// labelHostname names one node.
const labelHostname = "kubernetes.io/hostname"

// maxPriority is the highest priority that the API takes.
const maxPriority = 1000000

// policyFor is a policy that shares the GPUs of a fleet, and of no other nodes of another policy, in a way; or why
// there is none. The policy that governs the nodes keeps its name if it governs no others.
func (c Cluster) policyFor(f Fleet, sharing v1alpha1.Sharing) (p *v1alpha1.GPUSharingPolicy, why string) {
	if len(f.Others) > 0 {
		return nil, "containers of other namespaces use these nodes too: " + format.List(f.Others)
	}
	p = &v1alpha1.GPUSharingPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "GPUSharingPolicy"},
		ObjectMeta: metav1.ObjectMeta{Name: f.Policy},
	}
	if f.Policy != "" {
		at := slices.IndexFunc(c.Policies, func(known v1alpha1.GPUSharingPolicy) bool { return known.Name == f.Policy })
		if at < 0 {
			return nil, fmt.Sprintf("policy %s, which governs these nodes, is not there any more", f.Policy)
		}
		c.Policies[at].Spec.DeepCopyInto(&p.Spec)
	}
	if p.Spec.NodeSelector == nil {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{}
	}
	if s := p.Spec.GPUSelector; s != nil && len(s.Indexes) > 0 {
		return nil, fmt.Sprintf("policy %s selects GPUs by their indexes, and advice is for whole nodes", f.Policy)
	}
	p.Spec.Sharing = *sharing.DeepCopy()
	if !c.governsOnly(f) {
		if f.Policy != "" && p.Spec.Priority >= maxPriority {
			return nil, fmt.Sprintf("policy %s has the highest priority that there is, so no other can take nodes from it; lower its priority", f.Policy)
		}
		c.narrow(p, f)
		if why := c.leaveOut(p, f); why != "" {
			return nil, why
		}
	}
	return p, ""
}

// governsOnly reports whether a policy governs the nodes of a fleet and no others, also none that refuses it as it is now: it may take what is
// advised.
func (c Cluster) governsOnly(f Fleet) bool {
	ranking := policy.Rank(c.Policies)
	other := func(n cluster.Node) bool {
		by := ranking.Govern(c.wouldBe(&n)).By
		return !f.has(n.Name) && (n.GPU.Spec.PolicyName == f.Policy || by != nil && by.Name == f.Policy)
	}
	return f.Policy != "" && !slices.ContainsFunc(c.Nodes, other)
}

// narrow makes a policy one of its own, for the nodes of a fleet alone. It takes them from the policy that governs
// them, and no node from another.
func (c Cluster) narrow(p *v1alpha1.GPUSharingPolicy, f Fleet) {
	parts := []string{f.Policy, f.Device.Product}
	p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{f.Device.Product}}
	if c.Scope.Node != "" {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{labelHostname: f.Nodes[0].Labels[labelHostname]}}
		parts = append(parts, c.Scope.Node)
	}
	if f.Policy != "" {
		p.Spec.Priority++
	}
	for i := range c.Policies { // the youngest of equal priority takes no node from another
		if f.Policy == "" {
			p.Spec.Priority = min(p.Spec.Priority, c.Policies[i].Spec.Priority)
		}
	}
	base := name(strings.Join(parts, "-"))
	p.Name = base
	for n := 2; c.taken(p.Name); n++ {
		p.Name = fmt.Sprintf("%s-%d", base, n)
	}
}

// leaveOut keeps a policy from nodes that no advice is for and that it would take: those of another policy, those with
// GPUs of several products, and those of which too little is known. It returns why it cannot.
func (c Cluster) leaveOut(narrowed *v1alpha1.GPUSharingPolicy, f Fleet) (why string) {
	const mostValues = 64 // that the API takes
	candidate := narrowed.DeepCopy()
	candidate.CreationTimestamp = metav1.Unix(math.MaxInt32, 0)
	ranking := policy.Rank(append(slices.Clone(c.Policies), *candidate))
	var names, hosts []string
	for i := range c.Nodes {
		n := &c.Nodes[i]
		governed := ranking.Govern(policy.Node{Labels: n.Labels, Devices: n.GPU.Status.Devices}).By
		if governed == nil || governed.Name != candidate.Name || f.has(n.Name) {
			continue
		}
		names, hosts = append(names, n.Name), append(hosts, n.Labels[labelHostname])
	}
	if len(hosts) == 0 {
		return ""
	}
	if len(hosts) > mostValues || slices.Contains(hosts, "") {
		return "it would change nodes for which no advice is given: " + format.List(names)
	}
	narrowed.Spec.NodeSelector.MatchExpressions = append(narrowed.Spec.NodeSelector.MatchExpressions,
		v1alpha1.NodeSelectorRequirement{Key: labelHostname, Operator: "NotIn", Values: hosts})
	return ""
}

func (c Cluster) taken(name string) bool {
	return slices.Contains(c.advised, name) || slices.ContainsFunc(c.Policies, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == name })
}

// name makes the name of a policy of a text.
func name(s string) string {
	const most = 50
	s = regexp.MustCompile(`[^a-z0-9]+`).ReplaceAllString(strings.ToLower(s), "-")
	return strings.Trim(s[:min(len(s), most)], "-")
}
