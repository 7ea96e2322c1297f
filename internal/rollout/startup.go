// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// isStartup reports whether a taint keeps pods off a new node until it is as its policy asks.
func isStartup(t corev1.Taint) bool { return isStartupKey(t.Key) }

func isStartupKey(key string) bool {
	return key == v1alpha1.TaintStartup || key == v1alpha1.TaintStartupAutoscaler || key == v1alpha1.TaintStartupReadiness
}

// taintsNewNodes reports whether a policy asks for the startup taint.
func taintsNewNodes(p *v1alpha1.GPUSharingPolicy) bool {
	return p.Spec.Rollout.StartupTaint == v1alpha1.StartupTaintUntilReady
}

// startupTaints are the startup taints that nodes may get, so that NVIDIA's programs have to tolerate them. They do not depend on
// the nodes of today: a toleration that came with the first node of a group would replace NVIDIA's pods on all others.
func (w *World) startupTaints() []corev1.Taint {
	keys := []string{v1alpha1.TaintStartup, v1alpha1.TaintStartupAutoscaler}
	if w.ReadinessTaint || w.listed(v1alpha1.TaintStartupReadiness) {
		keys = append(keys, v1alpha1.TaintStartupReadiness)
	}
	taints := make([]corev1.Taint, len(keys))
	for i, key := range keys {
		taints[i] = corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule}
	}
	return taints
}

// groupLabels are the labels of nodes in groups that Cluster Autoscaler may scale, as the clouds set them: of EKS, GKE and AKS.
var groupLabels = []string{"eks.amazonaws.com/nodegroup", "cloud.google.com/gke-nodepool", "kubernetes.azure.com/agentpool"}

// annotationClusterAPIMachine names, on a node, its Machine of Cluster API. Source: kubernetes-sigs/cluster-api,
// api/core/v1beta2/common_types.go.
const annotationClusterAPIMachine = "cluster.x-k8s.io/machine"

// OfMachine reports whether an annotation of a Node names the Machine that the node belongs to.
func OfMachine(annotation string) bool {
	return annotation == AnnotationMachine || annotation == annotationClusterAPIMachine
}

// startupTaint is the startup taint for the node, with the key that ignores by itself which autoscaler may have made it. Another
// taint would make Cluster Autoscaler add nodes until one is Ready for a minute, and Karpenter without end.
func (v *view) startupTaint() corev1.Taint {
	key := v1alpha1.TaintStartup
	if has := v.startingUp(); has != nil {
		key = has.Key
	} else if isKarpenters(v.node) {
		key = v1alpha1.TaintStartupReadiness
	} else if inGroup(v.node) {
		key = v1alpha1.TaintStartupAutoscaler
	}
	return corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule}
}

// inGroup reports whether the node belongs to a group that Cluster Autoscaler may scale.
func inGroup(n *Node) bool {
	return n.Annotations[AnnotationMachine] != "" || n.Annotations[annotationClusterAPIMachine] != "" ||
		slices.ContainsFunc(groupLabels, func(label string) bool { return n.Labels[label] != "" })
}

// startingUp is the startup taint that the node has; nil if it has none.
func (v *view) startingUp() *corev1.Taint {
	at := slices.IndexFunc(v.node.Taints, isStartup)
	if at < 0 {
		return nil
	}
	return &v.node.Taints[at]
}

// wantStartup says whether the node is to have the startup taint. Who put it there does not matter: kubelet and
// autoscalers register nodes with it, and rely on us to take it off. A node that no policy governs loses it once its agent
// has reported: nobody will make such a node ready, and before that a policy that selects by GPU may still turn out to
// govern it.
func (m *member) wantStartup(g policy.Governed, awaited *v1alpha1.GPUSharingPolicy, t tolerance) bool {
	_, undiscovered := m.undiscovered()
	has := m.startingUp() != nil
	switch {
	case m.world.Wiring.Reason != "" && g.By != nil:
		return has // the policy is not honoured yet
	case g.By == nil && !undiscovered:
		return false
	case g.By != nil && m.State == StateUpToDate:
		return false
	case has:
		return true
	case g.By != nil:
		awaited = g.By
	}
	return awaited != nil && m.isNew(awaited) && m.karpenterWaits() && m.toleratesStartup(t)
}

// isNew says whether the node joined after the policy, was never as it asks, and offers no GPU yet: taints come too late
// for a node that has run pods.
func (m *member) isNew(p *v1alpha1.GPUSharingPolicy) bool {
	return taintsNewNodes(p) && !p.Spec.Rollout.Paused &&
		m.node.Created.After(p.CreationTimestamp.Time) && m.node.GPU.Status.Rollout.LastGood == nil && m.advertisesNoGPU()
}

// toleratesStartup says whether NVIDIA's programs can come to a node with the startup taint. Without the device plugin it
// would never be ready.
func (m *member) toleratesStartup(t tolerance) bool {
	if m.world.Wiring.Reason != "" {
		return false
	}
	taint := m.startupTaint()
	reason, message := t.refuses(taint)
	if reason == "" {
		reason, message = t.refusesOn(m.node, taint)
	}
	if reason != "" {
		m.kept.reason, m.kept.message = reason, message
	}
	return reason == ""
}

// saysStartup adds to the message of a node that it takes no pods, and what keeps it from becoming ready.
func (m *member) saysStartup(g policy.Governed, t tolerance) {
	has := m.startingUp()
	if has == nil || g.By == nil || m.world.Wiring.Reason != "" {
		return
	}
	says := fmt.Sprintf("the node keeps the taint %s until it is as the policy asks", nameOf(*has))
	if _, message := t.refuses(*has); message != "" {
		says += "; " + message
	}
	if m.message != "" {
		says = m.message + "; " + says
	}
	m.message = says
}
