// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// planReport is what plan prints for programs.
type planReport struct {
	// Unread is what is not known, because the user may not read it.
	Unread []string `json:"unread,omitempty"`
	// Outcome is NoChange, NonDisruptive, Disruptive or Unsatisfiable: by it plan exits with 0, 2, 3 or 4.
	Outcome  string          `json:"outcome"`
	Policies []plannedPolicy `json:"policies"`
	// Nodes are those that one of the policies governs before the change or after it.
	Nodes []plannedNode `json:"nodes"`
}

// The values of plannedPolicy.Change.
const (
	changeCreate = "Create"
	changeUpdate = "Update"
	changeDelete = "Delete"
	changeNone   = "None" // the policy is in the cluster as it is
)

type plannedPolicy struct {
	Name   string `json:"name"`
	Change string `json:"change"`
	// Status is the first that the controller would write; nil: the policy is deleted.
	Status *v1alpha1.GPUSharingPolicyStatus `json:"status,omitempty"`
}

type plannedNode struct {
	Name string `json:"name"`
	// FormerPolicy governs the node before the change, Policy after it; empty: none does.
	FormerPolicy string `json:"formerPolicy,omitempty"`
	Policy       string `json:"policy,omitempty"`
	// State, Reason and Message are those with which the rollout begins on the node.
	State   string `json:"state"`
	Reason  string `json:"reason"`
	Message string `json:"message,omitempty"`
	// Advertised are the resources that the node offers now. Expected are those that it offers once it is in the
	// desired state or, where it cannot be, goes on to offer; it is absent where no policy governs the node.
	Advertised map[string]int64 `json:"advertised"`
	Expected   map[string]int64 `json:"expected,omitempty"`
	Steps      []string         `json:"steps"`
	BlockedBy  []string         `json:"blockedBy,omitempty"`
}

// planOf is what would happen after a change of the policies.
func planOf(s cluster.Snapshot, c change) planReport {
	before, after := rollout.Decide(s), rollout.Decide(c.of(s))
	report := planReport{Unread: c.lacks, Outcome: outcomeOf(s, c).name(), Policies: []plannedPolicy{}, Nodes: []plannedNode{}}
	names := slices.Clone(c.deleted)
	for _, policy := range c.applied {
		names = append(names, policy.Name)
		status := after.Policies[policy.Name]
		report.Policies = append(report.Policies, plannedPolicy{policy.Name, changeOf(s, &policy), &status})
	}
	for _, name := range c.deleted {
		report.Policies = append(report.Policies, plannedPolicy{Name: name, Change: changeDelete})
	}
	was, selected := map[string]string{}, map[string]string{}
	for _, n := range before.Nodes {
		was[n.Node] = n.Policy
	}
	for i := range s.Nodes {
		selected[s.Nodes[i].Name] = s.Nodes[i].Labels[v1alpha1.LabelConfig]
	}
	for _, n := range after.Nodes {
		if slices.Contains(names, n.Policy) || slices.Contains(names, was[n.Node]) {
			report.Nodes = append(report.Nodes, plannedNodeOf(n, was[n.Node], selected[n.Node]))
		}
	}
	return report
}

// plannedNodeOf is a node after a change, with the policy that governed it before and the configuration that it selects
// now.
func plannedNodeOf(n rollout.NodeState, was, selected string) plannedNode {
	planned := plannedNode{
		Name: n.Node, FormerPolicy: was, Policy: n.Policy, State: string(n.State), Reason: n.Reason, Message: n.Message,
		Advertised: map[string]int64{}, Steps: append([]string{}, steps(n, selected)...),
	}
	maps.Copy(planned.Advertised, n.Advertised)
	if n.Policy != "" {
		planned.Expected = thenOffered(&n)
	}
	for _, b := range n.Blockers {
		planned.BlockedBy = append(planned.BlockedBy, b.String())
	}
	return planned
}
