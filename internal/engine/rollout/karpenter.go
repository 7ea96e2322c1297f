// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
)

// startsUntainted reports whether the node is not in service yet, as one with the startup taint, though it has none.
func startsUntainted(m *member) bool {
	return taintsNewNodes(m.Policy) && m.Node.GPU.Status.Rollout.LastGood == nil &&
		node.MustStayUntainted(m.View) && len(m.Blockers) == 0
}

// karpenterIgnoresStartup reports whether the startup taint that the operator would put on the node makes Karpenter
// start no other. Karpenter takes a node with a taint that it does not know for one without room, and starts another,
// for which the same holds.
func karpenterIgnoresStartup(v *node.View) bool {
	return !cluster.IsKarpenters(v.Node) || v.Snapshot.ReadinessTaint
}

// karpenterWaits is karpenterIgnoresStartup, and reports why the node lacks the taint.
func karpenterWaits(m *member) bool {
	if karpenterIgnoresStartup(m.View) {
		return true
	}
	m.TaintStatus.Reason, m.TaintStatus.Message = v1alpha1.ReasonStartupTaintMissing, "Karpenter made the node without the startup taint, so pods may start before it is ready"
	return false
}

// poolsList reports whether a NodePool puts a startup taint on its new nodes, whatever the operator itself would put
// there.
func poolsList(s *cluster.Snapshot, key string) bool {
	for _, pool := range s.NodePools {
		if slices.Contains(pool.StartupTaints, key) {
			return true
		}
	}
	return false
}

// startupMissing reports the NodePools whose nodes start without the startup taint, of those that the policy has nodes
// of.
func startupMissing(g *Group, s *cluster.Snapshot) (messages []string) {
	if !taintsNewNodes(g.By) || s.ReadinessTaint {
		return nil
	}
	var pools []string
	for _, m := range g.Members {
		name := m.Node.Labels[cluster.LabelNodePool]
		if pool, known := s.NodePools[name]; known && !slices.ContainsFunc(pool.StartupTaints, isStartupKey) && !slices.Contains(pools, name) {
			pools = append(pools, name)
		}
	}
	slices.Sort(pools)
	for _, name := range pools {
		messages = append(messages, fmt.Sprintf("NodePool %s of Karpenter lacks the startup taint, so pods may start before a node is ready. Add "+
			"startupTaints: [{key: %s, effect: NoSchedule}], which replaces all its nodes", name, v1alpha1.TaintStartup))
	}
	return messages
}
