// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// change is what plan is asked about: policies that are created or get another spec, and the names of those that are
// deleted.
type change struct {
	applied []v1alpha1.GPUSharingPolicy
	deleted []string
	// found names the configuration of the device plugin that the ClusterPolicy named before the operator; empty: none.
	found string
	// lacks is what is not known, because the user may not read it.
	lacks []string
	// otherStack asks what pods could request if the other one of NVIDIA's programs offered the GPUs.
	otherStack bool
}

// of returns the snapshot as it is after the change.
func (c change) of(s cluster.Snapshot) cluster.Snapshot {
	s.Policies = slices.DeleteFunc(slices.Clone(s.Policies), func(p v1alpha1.GPUSharingPolicy) bool {
		return slices.Contains(c.deleted, p.Name)
	})
	for _, policy := range c.applied {
		if at := slices.IndexFunc(s.Policies, named(policy.Name)); at >= 0 {
			s.Policies[at] = policy
		} else {
			s.Policies = append(s.Policies, policy)
		}
	}
	return s
}

func named(name string) func(v1alpha1.GPUSharingPolicy) bool {
	return func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == name }
}

// knows returns an error if one of the policies to delete does not exist, or is to be applied too.
func knows(s cluster.Snapshot, c change) error {
	for _, name := range c.deleted {
		if slices.ContainsFunc(c.applied, named(name)) {
			return fmt.Errorf("policy %q is in a file and in --delete; leave one of them out", name)
		}
		if !slices.ContainsFunc(s.Policies, named(name)) {
			return fmt.Errorf("there is no policy %q to delete; `kubectl get gpusharingpolicies` lists them", name)
		}
	}
	return nil
}

// deleted writes what the deletion of a policy comes to as a whole.
func (t *text) deleted(name string, c change, s cluster.Snapshot, before, after []rollout.NodeState) {
	governed, untouched, tainted := 0, []string{}, []string{}
	for _, n := range before {
		if n.Policy != name {
			continue
		}
		governed++
		goes := !slices.ContainsFunc(after, func(a rollout.NodeState) bool { return a.Node == n.Node && a.Policy != "" })
		has := func(o cluster.Node) bool { return o.Name == n.Node && o.Annotations[v1alpha1.AnnotationTaints] != "" }
		if goes && slices.ContainsFunc(s.Nodes, has) {
			tainted = append(tainted, n.Node)
		}
		if !slices.ContainsFunc(after, func(a rollout.NodeState) bool { return a.Node == n.Node }) {
			untouched = append(untouched, n.Node)
		}
	}
	t.row(0, "", fmt.Sprintf("POLICY %s (deleted): releases %s", name, count(governed, "node")))
	if len(tainted) > 0 {
		t.row(2, "taints", fmt.Sprintf("the operator removes the policy's taints from %s: %s", count(len(tainted), "node"), strings.Join(tainted, ", ")))
	}
	if len(untouched) > 0 {
		t.row(2, "unchanged", fmt.Sprintf("the GPUs of %s, which the operator has not changed: %s", count(len(untouched), "node"), strings.Join(untouched, ", ")))
	}
	t.rows("affected", lost(name, c, s, before, after))
}

// clusterPolicy writes when NVIDIA's ClusterPolicy is restored: once no node needs the operator's ConfigMap any more,
// and no policy that could change one is left. A paused policy changes none.
func (t *text) clusterPolicy(s cluster.Snapshot, before, after rollout.Decision) {
	if !s.Plugin.ClusterPolicy || !before.ConfigurePlugin || rollout.Decide(restored(s, after.Nodes)).ConfigurePlugin {
		return
	}
	left := "No policy is left."
	if len(s.Policies) > 0 {
		left = "No policy is left that is not paused."
	}
	t.WriteString("\n")
	t.row(0, "", left+" Once every node is restored the operator restores NVIDIA's ClusterPolicy, which restarts NVIDIA's device "+
		"plugin and GPU Feature Discovery on every GPU node; running pods keep their GPUs.")
}

// restored is the snapshot once every node that no policy governs is restored.
func restored(s cluster.Snapshot, nodes []rollout.NodeState) cluster.Snapshot {
	s.Nodes = slices.Clone(s.Nodes)
	for i := range s.Nodes {
		n := &s.Nodes[i]
		goesBack := func(s rollout.NodeState) bool { return s.Node == n.Name && s.Policy == "" && !s.Retained }
		if slices.ContainsFunc(nodes, goesBack) {
			n.GPU.Spec = v1alpha1.GPUNodeSpec{}
		}
	}
	return s
}
