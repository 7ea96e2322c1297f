// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// notListed is the state of a node that may be one of those which its policy counts as not ready and does not list.
const notListed = "NotListed"

// pendingNode is a node that is not ready.
type pendingNode struct {
	v1alpha1.PendingNode

	policy string
	steps  []string // as far as its GPUNode does not report them
}

// unready returns the nodes that are not ready, by name: as their policies list them, or as their GPUNodes report. The
// state of those that neither reports, as before the controller has observed a policy, is decided from their objects,
// as the controller decides it.
func unready(s cluster.Snapshot) map[string]pendingNode {
	found := map[string]pendingNode{}
	for i := range s.Nodes {
		addReported(found, &s.Nodes[i].GPU)
	}
	for i := range s.Policies {
		for _, n := range s.Policies[i].Status.Pending {
			if n.Reason != v1alpha1.ReasonConflicted {
				found[n.NodeName] = pendingNode{PendingNode: n, policy: s.Policies[i].Name}
			}
		}
	}
	var states []rollout.NodeState
	for i := range s.Policies {
		p := &s.Policies[i]
		more := unlisted(p)
		if more == 0 && observed(p) {
			continue
		}
		if states == nil {
			states = rollout.Decide(s).Nodes
		}
		addUnlisted(found, p.Name, more, states)
	}
	return found
}

// stepsLeft are the steps that nodes which are not ready have before them, by node: those that the controller has
// reported may be done.
func stepsLeft(s cluster.Snapshot, pending map[string]pendingNode) map[string][]string {
	waits := func(n cluster.Node) bool {
		_, is := pending[n.Name]
		return is && len(n.GPU.Status.Rollout.Steps) > 0
	}
	if !slices.ContainsFunc(s.Nodes, waits) {
		return nil
	}
	left := map[string][]string{}
	for _, n := range rollout.Decide(s).Nodes {
		left[n.Node] = n.Plan
	}
	for i := range s.Nodes {
		r := s.Nodes[i].GPU.Status.Rollout
		if !slices.ContainsFunc(s.Policies, named(r.PolicyName)) {
			left[s.Nodes[i].Name] = r.Steps // its policy is gone, or cannot be read
		}
	}
	return left
}

// addReported adds a node that the controller reports as not ready in its GPUNode.
func addReported(found map[string]pendingNode, n *v1alpha1.GPUNode) {
	r := n.Status.Rollout
	c, reported := condition.Find(n.Status.Conditions, v1alpha1.ConditionReady)
	if !reported || r.PolicyName == "" || r.State == "" || c.Status == metav1.ConditionTrue {
		return
	}
	found[n.Name] = pendingNode{policy: r.PolicyName, PendingNode: v1alpha1.PendingNode{
		NodeName: n.Name, State: r.State, Reason: c.Reason, Message: c.Message,
	}}
}

// addUnlisted adds the nodes of a policy that it does not list and that are not ready. More is how many these are at
// least.
func addUnlisted(found map[string]pendingNode, policy string, more int, states []rollout.NodeState) {
	var rest []string
	for _, s := range states {
		if _, listed := found[s.Node]; listed || s.Policy != policy {
			continue
		}
		if s.State == node.UpToDate {
			rest = append(rest, s.Node)
			continue
		}
		more--
		found[s.Node] = pendingNode{policy: policy, steps: s.Plan, PendingNode: v1alpha1.PendingNode{
			NodeName: s.Node, State: string(s.State), Reason: s.Reason, Message: s.Message,
		}}
	}
	if more <= 0 {
		return
	}
	for _, name := range rest {
		found[name] = pendingNode{policy: policy, PendingNode: v1alpha1.PendingNode{
			NodeName: name, Reason: notListed, Message: fmt.Sprintf("policy %s counts %s that it does not list as not ready, and this node "+
				"may be one of them; its own objects show no reason", policy, count(more, "node")),
		}}
	}
}

// unlisted is how many nodes that are not ready a policy counts and does not list.
func unlisted(p *v1alpha1.GPUSharingPolicy) int {
	n := p.Status.Nodes
	more := int(n.Matched - n.Conflicted - n.Ready)
	for _, listed := range p.Status.Pending {
		if listed.Reason != v1alpha1.ReasonConflicted && listed.State != string(node.UpToDate) {
			more--
		}
	}
	return more
}

// observed reports whether the status of a policy is about its generation.
func observed(p *v1alpha1.GPUSharingPolicy) bool { return p.Status.ObservedGeneration >= p.Generation }
