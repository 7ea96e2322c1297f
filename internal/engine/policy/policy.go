// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy knows which policy governs which node, and what it asks of one node or why it cannot. It is pure.
//
// One policy governs a whole node: NVIDIA's device plugin has one configuration per node. Among the policies that
// select a node the one of the highest priority governs it, among equals the oldest, then the first by name; the others
// are told so. Nodes are selected by labels that sharing never changes, and GPUs by the inventory of the node's agent,
// never by NVIDIA's product label, which sharing does change.
package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Node is what of a node matters to a policy.
type Node struct {
	Name   string
	Labels map[string]string
	// Devices are its GPUs as its agent reported them; none before it has.
	Devices []v1alpha1.DeviceStatus
	// Changed are the GPUs that the operator has changed, each in its state before that.
	Changed []v1alpha1.DeviceSpec
	// Workload is what nodes are for whose labels do not tell it, see OptedOut.
	Workload string
	// Stack is which of NVIDIA's programs offers its GPUs; empty: the device plugin.
	Stack dra.Stack
	// SetsTimeSlices says that this is NVIDIA's DRA driver with its feature gate TimeSlicingSettings, by which it sets the
	// time slice for each claim.
	SetsTimeSlices bool
	// Shares is how many claims can share a GPU, as NVIDIA's DRA driver publishes it; 0: not known, or any number.
	Shares int64
	// Policy governs the node by what is recorded, and Numbering are the indexes of the GPUs as they were resolved for
	// it.
	Policy    string
	Numbering *v1alpha1.Numbering
	// Demand is what was decided for pods that wait. ConfigName and Asked are the config and the GPUs that its agent was asked for last.
	Demand     []v1alpha1.GPUDemand
	ConfigName string
	Asked      []v1alpha1.DeviceSpec
}

// Governed is a node that at least one policy selects.
type Governed struct {
	// By is the policy that governs it.
	By *v1alpha1.GPUSharingPolicy
	// Over are the others that select it, by precedence.
	Over []*v1alpha1.GPUSharingPolicy
}

// Ranking is the policies that count, by precedence, with their selectors ready for use.
type Ranking []ranked

type ranked struct {
	policy   *v1alpha1.GPUSharingPolicy
	selector labels.Selector
}

// MostPolicies is how many policies the operator follows. Each reconcile compares every policy with every node that has
// changed, each policy has configs in one ConfigMap, and its taints need tolerations in one ClusterPolicy. It is more
// than a cluster has teams.
const MostPolicies = 500

// Within returns the policies that the operator follows, in their order, and those beyond MostPolicies. Policies that
// govern a node, by name, come first, then the oldest, then the first by name: a further policy takes no node from
// another, whatever its priority.
func Within(policies []v1alpha1.GPUSharingPolicy, governs map[string]bool) (within, beyond []v1alpha1.GPUSharingPolicy) {
	if len(policies) <= MostPolicies {
		return policies, nil
	}
	order := make([]*v1alpha1.GPUSharingPolicy, len(policies))
	for i := range policies {
		order[i] = &policies[i]
	}
	first := func(p *v1alpha1.GPUSharingPolicy) int {
		if governs[p.Name] {
			return 0
		}
		return 1
	}
	slices.SortFunc(order, func(a, b *v1alpha1.GPUSharingPolicy) int {
		return cmp.Or(cmp.Compare(first(a), first(b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	out := make(map[string]bool, len(policies)-MostPolicies)
	for _, p := range order[MostPolicies:] {
		out[p.Name] = true
	}
	for i := range policies {
		if out[policies[i].Name] {
			beyond = append(beyond, policies[i])
		} else {
			within = append(within, policies[i])
		}
	}
	return within, beyond
}

// Rank orders policies by precedence. One that is being deleted does not count any more.
func Rank(policies []v1alpha1.GPUSharingPolicy) Ranking {
	ranking := make(Ranking, 0, len(policies))
	for i := range policies {
		if policies[i].DeletionTimestamp.IsZero() {
			ranking = append(ranking, ranked{policy: &policies[i], selector: SelectorOf(policies[i].Spec.NodeSelector)})
		}
	}
	slices.SortFunc(ranking, func(a, b ranked) int { return precedence(a.policy, b.policy) })
	return ranking
}

func precedence(a, b *v1alpha1.GPUSharingPolicy) int {
	return cmp.Or(
		cmp.Compare(b.Spec.Priority, a.Spec.Priority),
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.Name, b.Name),
	)
}

// Govern finds the policy that governs a node, and those that would like to. By is nil if none selects it.
func (r Ranking) Govern(n Node) Governed { return r.Governed(r.Selecting(n)) }

// Selecting lists the policies that select a node as positions in the ranking, by precedence. They hold for every
// ranking with the same signature until the node changes.
func (r Ranking) Selecting(n Node) []int {
	var positions []int
	var devices []gpu.Device
	for i, candidate := range r {
		if !candidate.selector.Matches(labels.Set(n.Labels)) {
			if n.Policy == candidate.policy.Name && unreadable(candidate.policy.Spec.NodeSelector) {
				positions = append(positions, i) // it stays as it is
			}
			continue
		}
		if candidate.policy.Spec.GPUSelector != nil {
			if devices == nil {
				devices = plan.Devices(n.Devices)
			}
			if !selectsAny(candidate.policy, n, devices) {
				continue // once the GPUs are known, at least one of them has to match
			}
		}
		positions = append(positions, i)
	}
	return positions
}

// selectsAny reports whether a policy selects one of the GPUs of a node, or selected one that is missing now.
func selectsAny(p *v1alpha1.GPUSharingPolicy, n Node, devices []gpu.Device) bool {
	if n.numbered(p) == nil {
		return len(selectGPUs(p, devices)) > 0
	}
	return len(selectGPUs(p, n.devices(p))) > 0 || len(Missing(p, n)) > 0
}

// Governed is what Selecting found.
func (r Ranking) Governed(positions []int) Governed {
	var g Governed
	for i, position := range positions {
		if i == 0 {
			g.By = r[position].policy
			continue
		}
		g.Over = append(g.Over, r[position].policy)
	}
	return g
}

// Signature differs if another policy, or another generation of one, takes part in the ranking.
func (r Ranking) Signature() string {
	var signature strings.Builder
	for _, candidate := range r {
		fmt.Fprintf(&signature, "%s %s %d,", candidate.policy.Name, candidate.policy.UID, candidate.policy.Generation)
	}
	return signature.String()
}

// Awaits is the policy that may turn out to govern a node whose GPUs are not known yet. Nil: none, or they are.
func (r Ranking) Awaits(n Node) *v1alpha1.GPUSharingPolicy {
	if len(n.Devices) > 0 {
		return nil
	}
	for _, candidate := range r {
		if candidate.selector.Matches(labels.Set(n.Labels)) {
			return candidate.policy
		}
	}
	return nil
}

// selectGPUs are the GPUs that a policy selects.
func selectGPUs(p *v1alpha1.GPUSharingPolicy, devices []gpu.Device) []gpu.Device {
	var selected []gpu.Device
	for _, d := range devices {
		if plan.Matches(p.Spec.GPUSelector, d) {
			selected = append(selected, d)
		}
	}
	return selected
}

// SelectorOf is a selector of a policy in the form that matches labels; absent or without requirements it matches all. What
// no label can be, which the API server refuses, matches nothing.
func SelectorOf(s *v1alpha1.NodeSelector) labels.Selector {
	selector, err := readSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return selector
}

// unreadable reports whether a selector has what only a later version of the operator knows.
func unreadable(s *v1alpha1.NodeSelector) bool {
	_, err := readSelector(s)
	return err != nil
}

func readSelector(s *v1alpha1.NodeSelector) (labels.Selector, error) {
	if s == nil {
		return labels.Everything(), nil
	}
	usual := metav1.LabelSelector{MatchLabels: s.MatchLabels}
	for _, e := range s.MatchExpressions {
		usual.MatchExpressions = append(usual.MatchExpressions, metav1.LabelSelectorRequirement{
			Key: e.Key, Operator: metav1.LabelSelectorOperator(e.Operator), Values: e.Values,
		})
	}
	return metav1.LabelSelectorAsSelector(&usual) //nolint:wrapcheck // it is asked whether there is one
}
