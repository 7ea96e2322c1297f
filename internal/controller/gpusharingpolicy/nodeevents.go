// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// announceNodes tells, on the policy and on the node, of nodes that a person should look at since the last status, and
// of those that need it no more. A node that the status no longer lists may only have made room for others: then its
// state decides.
func (an *eventRecorder) announceNodes(policy *v1alpha1.GPUSharingPolicy, pending []v1alpha1.PendingNode, states []rollout.NodeState) {
	was, is := worrying(policy.Status.Pending), worrying(pending)
	for _, n := range pending {
		if _, worries := is[n.NodeName]; worries && was[n.NodeName].Reason != n.Reason {
			e := eventReasonWaits
			e.Reason = n.Reason
			an.emitBoth(e, policy, n.NodeName, fmt.Sprintf("node %s: %s", n.NodeName, n.Message))
		}
	}
	for _, n := range policy.Status.Pending {
		if _, did := was[n.NodeName]; !did {
			continue
		}
		_, worries := is[n.NodeName]
		if !worries && !slices.ContainsFunc(states, func(s rollout.NodeState) bool {
			return s.Node == n.NodeName && s.Policy == policy.Name && node.Worrying(string(s.State), s.Reason)
		}) {
			e := eventReasonReached
			e.Reason = v1alpha1.EventRecovered
			an.emitBoth(e, policy, n.NodeName, fmt.Sprintf("node %s: no longer %s", n.NodeName, n.Reason))
		}
	}
}

func worrying(pending []v1alpha1.PendingNode) map[string]v1alpha1.PendingNode {
	found := map[string]v1alpha1.PendingNode{}
	for _, n := range pending {
		if node.Worrying(n.State, n.Reason) {
			found[n.NodeName] = n
		}
	}
	return found
}

// emitBoth tells the policy and the node, where those who work on it look.
func (an *eventRecorder) emitBoth(e announcement, policy *v1alpha1.GPUSharingPolicy, name, note string) {
	node := an.nodeNamed(name)
	an.emit(e, policy, node, note)
	an.emit(e, node, policy, note)
}
