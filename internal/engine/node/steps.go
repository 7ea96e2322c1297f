// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// overruledLeft is how long another controller is still left alone that sets a label again.
func overruledLeft(v *View, label string) time.Duration {
	for part := range strings.SplitSeq(v.Node.Annotations[v1alpha1.AnnotationOverruled], ",") {
		if at, did := timing.Stamped(part, label); did {
			return at.Add(timing.Patience).Sub(v.Snapshot.Now)
		}
	}
	return 0
}

// noteOverruled notes in a patch that the operator sets a label again which another controller had set.
func noteOverruled(v *View, patch action.PatchNode, label string) {
	noted := v.Node.Annotations[v1alpha1.AnnotationOverruled]
	if in, has := patch.Annotations[v1alpha1.AnnotationOverruled]; has && in != nil {
		noted = *in
	}
	parts := []string{timing.Stamp(label, v.Snapshot.Now)}
	for part := range strings.SplitSeq(noted, ",") {
		if part != "" && !strings.HasPrefix(part, label+"@") {
			parts = append(parts, part)
		}
	}
	slices.Sort(parts)
	patch.Annotations[v1alpha1.AnnotationOverruled] = new(strings.Join(parts, ","))
}

// triggerSyncs makes the kubelet project the ConfigMap into the pods that mount it and do not see the key yet, again and again:
// one that comes before the kubelet knows of the key is lost. left is when to look again.
func triggerSyncs(v *View) (syncs []action.Action, left time.Duration, unseen []string) {
	for _, p := range v.Node.Pods {
		if !p.MountsConfig || p.Terminating {
			continue
		}
		at, synced := timing.Stamped(p.SyncTriggered, v.Target.Config)
		age := v.Snapshot.Now.Sub(at)
		sees, watched := seesConfig(v, p)
		if sees || !watched && synced && age >= timing.VisibleAfter {
			continue
		}
		unseen = append(unseen, p.Namespace+"/"+p.Name)
		if !synced || age >= timing.VisibleAfter {
			syncs = append(syncs, action.TriggerSync{
				Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Value: timing.Stamp(v.Target.Config, v.Snapshot.Now),
			})
			age = 0
		}
		left = max(left, timing.VisibleAfter-age)
	}
	slices.Sort(unseen)
	return syncs, left, unseen
}

// seesConfig says whether a pod has the key before it as the agent reports it, and watched whether the agent will: it saw the
// pod's config-manager with another key, and has not been silent for too long.
func seesConfig(v *View, p cluster.Pod) (sees, watched bool) {
	config, since := v.Node.GPU.Status.Config, v.Node.GPU.Spec.ChangeTime
	listed := slices.Contains(config.PodUIDs, p.UID)
	if config.Name == v.Target.Config && config.ChangeTime.Equal(&since) {
		return listed, false
	}
	return false, listed && v.Snapshot.Now.Sub(since.Time) < timing.AgentSilent
}

// deletePod deletes a pod of the node.
func deletePod(v *View, p cluster.Pod, why string) action.DeletePod {
	return action.DeletePod{Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Why: why}
}
