// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
)

// isStartupTaint reports whether a taint keeps pods off a new node until it is as its policy asks.
func isStartupTaint(t corev1.Taint) bool { return isStartupKey(t.Key) }

func isStartupKey(key string) bool {
	return key == v1alpha1.TaintStartup || key == v1alpha1.TaintStartupAutoscaler || key == v1alpha1.TaintStartupReadiness
}

// taintsNewNodes reports whether a policy asks for the startup taint.
func taintsNewNodes(p *v1alpha1.GPUSharingPolicy) bool {
	return p.Spec.Rollout.StartupTaint == v1alpha1.StartupTaintUntilReady
}

// startupTaints are the startup taints that nodes may get, so that NVIDIA's programs have to tolerate them. They do not
// depend on the nodes of today: a toleration that came with the first node of a group would replace NVIDIA's pods on
// all others.
func startupTaints(s *cluster.Snapshot) []corev1.Taint {
	keys := []string{v1alpha1.TaintStartup, v1alpha1.TaintStartupAutoscaler}
	if s.ReadinessTaint || poolsList(s, v1alpha1.TaintStartupReadiness) {
		keys = append(keys, v1alpha1.TaintStartupReadiness)
	}
	taints := make([]corev1.Taint, len(keys))
	for i, key := range keys {
		taints[i] = corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule}
	}
	return taints
}

// startupTaint is the startup taint for the node, with the key that ignores by itself which autoscaler may have made
// it. Another taint would make Cluster Autoscaler add nodes until one is Ready for a minute, and Karpenter without end.
// So the operator's own key is replaced if the node tells its group later, as nodes of Cluster API do.
func startupTaint(v *node.View) corev1.Taint {
	key := v1alpha1.TaintStartup
	if has := startupTaintOn(v); has != nil && !tellsGroupLate(v, has.Key) {
		key = has.Key
	} else if cluster.IsKarpenters(v.Node) {
		key = v1alpha1.TaintStartupReadiness
	} else if cluster.InGroup(v.Node) {
		key = v1alpha1.TaintStartupAutoscaler
	}
	return corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule}
}

// tellsGroupLate reports whether the node has the key for nodes of no group, and belongs to one that Cluster Autoscaler
// may scale.
func tellsGroupLate(v *node.View, key string) bool {
	return key == v1alpha1.TaintStartup && cluster.InGroup(v.Node) && !cluster.IsKarpenters(v.Node)
}

// startupTaintOn is the startup taint that the node has; nil if it has none.
func startupTaintOn(v *node.View) *corev1.Taint {
	at := slices.IndexFunc(v.Node.Taints, isStartupTaint)
	if at < 0 {
		return nil
	}
	return &v.Node.Taints[at]
}

// wantStartup reports whether the node is to have the startup taint. Who put it there does not matter: kubelet and
// autoscalers register nodes with it, and rely on us to take it off. A node that no policy governs loses it once its
// agent has reported, or there is no policy: nobody will make such a node ready, and before that a policy that selects
// by GPU may still turn out to govern it.
func wantStartup(m *member, g policy.Governed, awaited *v1alpha1.GPUSharingPolicy, t tolerance) bool {
	_, silent := node.AgentNotReporting(m.View)
	has := startupTaintOn(m.View) != nil
	switch {
	case m.NoPlugin() && g.By != nil:
		return has // the policy is not honoured yet
	case g.By == nil && (!silent || len(m.Snapshot.Policies) == 0):
		return false
	case g.By != nil && m.State == node.UpToDate:
		return false
	}
	by := cmp.Or(g.By, awaited)
	if has {
		return by != nil && taintsNewNodes(by) || !t.barredFrom(m.View)
	}
	return by != nil && isNewNode(m, by) && karpenterWaits(m) && toleratesStartup(m, t)
}

// isNewNode reports whether the node joined after the policy, was never as it asks, and offers no GPU yet: taints come
// too late for a node that has run pods.
func isNewNode(m *member, p *v1alpha1.GPUSharingPolicy) bool {
	return taintsNewNodes(p) && !p.Spec.Rollout.Paused &&
		m.Node.Created.After(p.CreationTimestamp.Time) && m.Node.GPU.Status.Rollout.LastGood == nil && node.AdvertisesNoGPU(m.View)
}

// toleratesStartup reports whether NVIDIA's programs can come to a node with the startup taint. Without the device
// plugin it would never be ready.
func toleratesStartup(m *member, t tolerance) bool {
	if m.NoPlugin() {
		return false
	}
	taint := startupTaint(m.View)
	reason, message := t.refuses(taint, t.byDriver(m.View))
	if reason == "" {
		reason, message = t.refusesOn(m.Node, taint)
	}
	if reason != "" {
		m.TaintStatus = taintStatus{reason, message}
	}
	return reason == ""
}

// explainStartup adds to the message of a node that it takes no pods, and what keeps it from becoming ready.
func explainStartup(m *member, g policy.Governed, t tolerance) {
	has := startupTaintOn(m.View)
	if has == nil || g.By == nil || m.NoPlugin() {
		return
	}
	says := fmt.Sprintf("the node keeps the taint %s until it is in the desired state", action.NameOf(*has))
	if _, message := t.refuses(*has, t.byDriver(m.View)); message != "" {
		says += "; " + message
	}
	if m.Message != "" {
		says = m.Message + "; " + says
	}
	m.Message = says
}

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
	m.TaintStatus = taintStatus{v1alpha1.ReasonStartupTaintMissing, "Karpenter made the node without the startup taint, so pods may start before it is ready"}
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
