// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// mostPending is how many nodes a policy's status lists.
const mostPending = 32

// announceNodes tells, on the policy and on the node, of nodes that a person should look at since the last status, and of
// those that need it no more.
func (p *pass) announceNodes(policy *v1alpha1.GPUSharingPolicy, pending []v1alpha1.PendingNode) {
	was, is := worrying(policy.Status.Pending), worrying(pending)
	for _, n := range pending {
		if _, worries := is[n.NodeName]; worries && was[n.NodeName].Reason != n.Reason {
			e := eventReasonWaits
			e.Reason = n.Reason
			p.emitBoth(e, policy, n.NodeName, fmt.Sprintf("node %s: %s", n.NodeName, n.Message))
		}
	}
	if len(pending) == mostPending {
		return // one that is not listed may only have made room
	}
	for _, n := range policy.Status.Pending {
		if _, did := was[n.NodeName]; !did {
			continue
		}
		if _, worries := is[n.NodeName]; !worries {
			e := eventReasonReached
			e.Reason = v1alpha1.EventRecovered
			p.emitBoth(e, policy, n.NodeName, fmt.Sprintf("node %s: no longer %s", n.NodeName, n.Reason))
		}
	}
}

func worrying(pending []v1alpha1.PendingNode) map[string]v1alpha1.PendingNode {
	found := map[string]v1alpha1.PendingNode{}
	for _, n := range pending {
		if rollout.Worrying(n) {
			found[n.NodeName] = n
		}
	}
	return found
}

// emitBoth tells the policy and the node, where those who work on it look.
func (p *pass) emitBoth(e announcement, policy *v1alpha1.GPUSharingPolicy, name, note string) {
	node := p.nodeNamed(name)
	p.emit(e, policy, node, note)
	p.emit(e, node, policy, note)
}

// nodeNamed is a node as the subject of an event.
func (p *pass) nodeNamed(name string) *corev1.Node {
	node := &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: name}}
	if found, is := p.node(name); is {
		node.UID = found.UID
	}
	return node
}
