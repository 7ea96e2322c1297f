// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// A new node that tells a group has the startup taint before it has a label of its GPUs, by which the rollout knows it. Until then Cluster
// Autoscaler takes it for a node without room, and adds another one every 10 seconds.
//
//	joins, tells its group → startup taint → Node Feature Discovery (NFD) → GPU label → the rollout keeps the taint until the node is ready

// Unlabelled is the value of a startup taint that the operator put on a node without a GPU label. The rollout takes the taint over with it.
const Unlabelled = "unlabelled"

// labelDeadline is how long a node may wait for its GPU label under the taint. NFD's worker and the GPU Operator take a minute, with images to
// pull; a node to which they do not come takes pods again.
const labelDeadline = 5 * time.Minute

// startingFor is how long a node without a GPU label counts as one that starts, so that what went wrong is reported.
const startingFor = time.Hour

// Starts reports whether a node without a GPUNode may be one that starts in a group, or has the startup taint as the operator put it there.
func Starts(n *corev1.Node, now time.Time) bool {
	is := cluster.Node{Labels: n.Labels, Annotations: n.Annotations, Taints: n.Spec.Taints}
	return slices.ContainsFunc(n.Spec.Taints, AwaitsLabel) || now.Sub(n.CreationTimestamp.Time) < startingFor && cluster.InGroup(&is) && !cluster.IsKarpenters(&is)
}

// AwaitsLabel reports whether a taint is the one that the operator put on a node without a GPU label.
func AwaitsLabel(t corev1.Taint) bool {
	return t.Key == v1alpha1.TaintStartupAutoscaler && t.Value == Unlabelled
}

// startupTaint is the taint that the operator puts on a node without a GPU label.
var startupTaint = corev1.Taint{Key: v1alpha1.TaintStartupAutoscaler, Value: Unlabelled, Effect: corev1.TaintEffectNoSchedule}

// WithStartup returns the taints of a node with that taint on or off. One with another value is a user's, and one is enough.
func WithStartup(taints []corev1.Taint, on bool) []corev1.Taint {
	switch has := slices.ContainsFunc(taints, func(t corev1.Taint) bool { return t.MatchTaint(&startupTaint) }); {
	case !on:
		return slices.DeleteFunc(slices.Clone(taints), AwaitsLabel)
	case !has:
		return append(slices.Clone(taints), startupTaint)
	}
	return taints
}

// taintsEarly reports whether new nodes of a policy get the startup taint before they have a GPU label: the policy asks for it, and NVIDIA's
// programs and NFD's workers tolerate it, or no label would ever come. By whom a pod looks like NFD's counts for nothing else: at worst the
// taint comes with the label, or goes after labelDeadline.
func (s *Snapshot) taintsEarly(by *v1alpha1.GPUSharingPolicy) bool {
	refuses := func(tolerations []corev1.Toleration) bool { return !cluster.Tolerates(tolerations, startupTaint.Key) }
	return by.Spec.Rollout.StartupTaint == v1alpha1.StartupTaintUntilReady && !by.Spec.Rollout.Paused && meta.IsStatusConditionTrue(by.Status.Conditions, v1alpha1.ConditionTainted) &&
		len(s.Discovery) > 0 && !slices.ContainsFunc(s.Discovery, refuses)
}

// starting decides on the new nodes of the group that have no GPU label yet.
func (e *entry) starting(wanted *wants) {
	if len(e.resources) == 0 || !e.s.taintsEarly(e.by) {
		return
	}
	for _, n := range e.g.starting {
		age := e.s.Now.Sub(n.Created)
		switch {
		case !n.Created.After(e.by.CreationTimestamp.Time) || len(advertised(n)) > 0:
		case age < labelDeadline:
			wanted.startups = append(wanted.startups, n.Name)
			if left := labelDeadline - age; e.after == 0 || left < e.after {
				e.after = left
			}
		default:
			e.find(v1alpha1.ReasonStartupGap, "Node %s has got no label %s within %s, so it takes pods. Look whether the pods of Node Feature Discovery and of NVIDIA's GPU Operator "+
				"run there", n.Name, cluster.LabelPresent, labelDeadline)
		}
	}
}

// startups are the writes that give nodes that start the taint, and take it off those that nobody waits for any more.
func (s *Snapshot) startups(wanted wants) (all []Write) {
	for i := range s.Starting {
		n := &s.Starting[i]
		on := slices.Contains(wanted.startups, n.Name)
		if with := WithStartup(n.Taints, on); len(with) != len(n.Taints) {
			all = append(all, Write{Startup: &Startup{Node: n.Name, On: on}})
		}
	}
	return all
}
