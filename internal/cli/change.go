// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// change is what plan is asked about: policies that are created or get another spec, and the names of those that are deleted.
type change struct {
	applied []v1alpha1.GPUSharingPolicy
	deleted []string
}

// of returns the world as it is after the change.
func (c change) of(w rollout.World) rollout.World {
	w.Policies = slices.DeleteFunc(slices.Clone(w.Policies), func(p v1alpha1.GPUSharingPolicy) bool {
		return slices.Contains(c.deleted, p.Name)
	})
	for _, policy := range c.applied {
		if at := slices.IndexFunc(w.Policies, named(policy.Name)); at >= 0 {
			w.Policies[at] = policy
		} else {
			w.Policies = append(w.Policies, policy)
		}
	}
	return w
}

func named(name string) func(v1alpha1.GPUSharingPolicy) bool {
	return func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == name }
}

// knows returns an error if one of the policies to delete does not exist.
func knows(w rollout.World, deleted []string) error {
	for _, name := range deleted {
		if !slices.ContainsFunc(w.Policies, named(name)) {
			return fmt.Errorf("there is no policy %q to delete; `kubectl get gpusharingpolicies` lists them", name)
		}
	}
	return nil
}

// deleted writes what the deletion of a policy comes to as a whole.
func (t *text) deleted(name string, before, after []rollout.NodeState) {
	governed, untouched := 0, []string{}
	for _, n := range before {
		if n.Policy != name {
			continue
		}
		governed++
		if !slices.ContainsFunc(after, func(a rollout.NodeState) bool { return a.Node == n.Node }) {
			untouched = append(untouched, n.Node)
		}
	}
	t.row(0, "", fmt.Sprintf("POLICY %s (deleted): releases %s", name, count(governed, "node")))
	if len(untouched) > 0 {
		t.row(2, "unchanged", fmt.Sprintf("%s, which the operator has not changed: %s", count(len(untouched), "node"), strings.Join(untouched, ", ")))
	}
}

// clusterPolicy writes when NVIDIA's ClusterPolicy is restored: with the last policy, once no node needs the operator's ConfigMap.
func (t *text) clusterPolicy(w rollout.World, after []rollout.NodeState) {
	retained := slices.ContainsFunc(after, func(n rollout.NodeState) bool { return n.Retained })
	if len(w.Policies) > 0 || retained || !w.Wiring.ClusterPolicy {
		return
	}
	t.WriteString("\n")
	t.row(0, "", "No policy is left. Once every node is restored the operator restores NVIDIA's ClusterPolicy, which restarts NVIDIA's device "+
		"plugin and GPU Feature Discovery on every GPU node; running pods keep their GPUs.")
}
