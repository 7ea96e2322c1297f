// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

const (
	// LabelNodePool names, on a node that Karpenter made, its NodePool. Source: sigs.k8s.io/karpenter, pkg/apis/v1/labels.go.
	LabelNodePool = "karpenter.sh/nodepool"
	// labelInitialized is on a node that Karpenter made once everything that its pods asked for is there.
	labelInitialized = "karpenter.sh/initialized"
	// taintUnregistered is on a node that Karpenter made until Karpenter has given it its labels and startup taints. Source: pkg/apis/v1/taints.go.
	taintUnregistered = "karpenter.sh/unregistered"
)

// NodePool is what of a NodePool of Karpenter matters here.
type NodePool struct {
	// StartupTaints are the keys of spec.template.spec.startupTaints. Karpenter puts these taints on each new node, and waits until
	// they are gone.
	StartupTaints []string
}

// isKarpenters reports whether Karpenter made the node.
func isKarpenters(n *Node) bool {
	return n.Labels[LabelNodePool] != "" || slices.ContainsFunc(n.Taints, func(t corev1.Taint) bool { return t.Key == taintUnregistered })
}

// mustStayUntainted reports whether v1alpha1.TaintChanging on the node would make Karpenter start another one: until a node is
// initialized, Karpenter takes any taint that it does not know for a sign that the node has no room. A change that nothing blocks then
// begins without the taint, however long the node has waited for NVIDIA's driver and for its turn. Its time counts from when NVIDIA's
// clients were paused (drainsSince): before that it keeps nobody waiting.
func (v *view) mustStayUntainted() bool {
	return isKarpenters(v.node) && v.node.Labels[labelInitialized] != labelTrue
}

// startsUntainted reports whether the node is not in service yet, as one with the startup taint, though it has none.
func (m *member) startsUntainted() bool {
	return taintsNewNodes(m.by) && m.node.GPU.Status.Rollout.LastGood == nil &&
		m.mustStayUntainted() && len(m.blockers) == 0
}

// karpenterIgnoresStartup reports whether the startup taint that the operator would put on the node makes Karpenter start no other.
// Karpenter takes a node with a taint that it does not know for one without room, and starts another, for which the same holds.
func (v *view) karpenterIgnoresStartup() bool { return !isKarpenters(v.node) || v.world.ReadinessTaint }

// karpenterWaits is karpenterIgnoresStartup, and reports why the node lacks the taint.
func (m *member) karpenterWaits() bool {
	if m.karpenterIgnoresStartup() {
		return true
	}
	m.kept.reason, m.kept.message = v1alpha1.ReasonStartupTaintMissing, "Karpenter made the node without the startup taint, so pods may start before it is ready"
	return false
}

// listed reports whether a NodePool puts a startup taint on its new nodes, whatever the operator itself would put there.
func (w *World) listed(key string) bool {
	for _, pool := range w.NodePools {
		if slices.Contains(pool.StartupTaints, key) {
			return true
		}
	}
	return false
}

// startupMissing reports the NodePools whose nodes start without the startup taint, of those that the policy has nodes of.
func (g *group) startupMissing(w *World) (messages []string) {
	if !taintsNewNodes(g.by) || w.ReadinessTaint {
		return nil
	}
	var pools []string
	for _, m := range g.members {
		name := m.node.Labels[LabelNodePool]
		if pool, known := w.NodePools[name]; known && !slices.ContainsFunc(pool.StartupTaints, isStartupKey) && !slices.Contains(pools, name) {
			pools = append(pools, name)
		}
	}
	slices.Sort(pools)
	for _, name := range pools {
		messages = append(messages, fmt.Sprintf("NodePool %s of Karpenter does not list the startup taint, so pods may start on its new nodes "+
			"before these are ready. Add to spec.template.spec of the NodePool: startupTaints: [{key: %s, effect: NoSchedule}]. Karpenter "+
			"then replaces all nodes of the NodePool, as its disruption budgets allow. With Karpenter v1.13 or newer, start the "+
			"controller with --karpenter-readiness-taint instead, and change no NodePool", name, v1alpha1.TaintStartup))
	}
	return messages
}
