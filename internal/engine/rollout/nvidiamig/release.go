// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidiamig

import (
	"fmt"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/baseline"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// A node that returns to its baseline gets the label back that mig-manager had before, and mig-manager itself where it was kept off. mig-manager
// applies what the label names, which may be another layout than the one in which the node was found, and from then on the GPUs are the
// administrator's: to restore them once more would begin a fight without end. The ClusterPolicy keeps naming the operator's ConfigMap until
// mig-manager has answered: to change that replaces the pod of mig-manager, which in the middle of its work would leave NVIDIA's clients paused.

// ReleaseLabels are the labels of mig-manager's that a node goes back to when nothing of ours is to be applied there. Its state is removed
// with that, so that the next one is its answer.
func ReleaseLabels(v *view.View, labels map[string]*string) {
	if v.Managed() && !v.Target.Final || !migmanager.Ours(v.Node.Labels[v1alpha1.LabelMIGConfig]) {
		return
	}
	labels[v1alpha1.LabelMIGConfig] = nil
	b := v.Node.GPU.Spec.Baseline
	if b == nil {
		return
	}
	if before, had := b.Labels[v1alpha1.LabelMIGConfig]; had {
		labels[v1alpha1.LabelMIGConfig] = &before
		if v.Managed() {
			labels[v1alpha1.LabelMIGConfigState] = nil
		}
	}
}

// StampAsked notes in the patch of a release since when mig-manager has its label back, and removes the stamp of anything else that it was
// asked for. One from a clock that was ahead is written anew: its time would end late.
func StampAsked(v *view.View, patch action.PatchNode) {
	name := restored(v, patch)
	if at, former, is := formerSince(v); name == "" && is && v.Target.Final {
		if !at.After(v.World.Now) {
			return
		}
		name = former
	}
	if name != "" {
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = new(timing.Stamp(name, v.World.Now))
		return
	}
	if _, asked := v.Node.Annotations[v1alpha1.AnnotationMIGConfig]; asked && !answering(v) {
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = nil
	}
}

// restored is the former label that a patch gives back to mig-manager; empty if it gives none back, or if no mig-manager is to read it.
func restored(v *view.View, patch action.PatchNode) string {
	_, manager := patch.Labels[v1alpha1.LabelMIGManager]
	_, config := patch.Labels[v1alpha1.LabelMIGConfig]
	name := patched(v, patch, v1alpha1.LabelMIGConfig)
	reads := v.Managed() || patched(v, patch, v1alpha1.LabelMIGManager) == world.LabelTrue
	if !v.Target.Final || !reads || !manager && !config || migmanager.Ours(name) || name == baseline.Claimed {
		return ""
	}
	return name
}

// patched is the value of a label once a patch is written.
func patched(v *view.View, patch action.PatchNode, label string) string {
	if value, changes := patch.Labels[label]; changes {
		return ptr.Deref(value, "")
	}
	return v.Node.Labels[label]
}

// Released reports whether mig-manager has the label back that it had before, so that the GPUs are not the operator's any more.
func Released(v *view.View) bool {
	_, _, is := formerSince(v)
	return is && v.Target.Final
}

// formerSince is since when mig-manager has the label back that it had before, and its value; another policy may govern the node since.
func formerSince(v *view.View) (at time.Time, name string, is bool) {
	name, at, is = timing.Parse(v.Node.Annotations[v1alpha1.AnnotationMIGConfig])
	return at, name, is && name != "" && !migmanager.Ours(name)
}

// answersBy is until when the answer of mig-manager to its former label is waited for; ok is false if it has answered, has no pod on the
// node that could, or if no change of the ClusterPolicy would replace its pod.
func answersBy(v *view.View) (by time.Time, ok bool) {
	at, _, former := formerSince(v)
	if !former || v.Node.GPU.Spec.Baseline == nil || !v.World.Plugin.MIGReady {
		return time.Time{}, false
	}
	runs, wasAway := len(view.ManagerPods(v)) > 0, v.Node.GPU.Spec.MIGActuator == ""
	switch state := v.Node.Labels[v1alpha1.LabelMIGConfigState]; {
	case state == world.ManagerRebooting:
		return at.Add(timing.RebootTimeout), runs
	case state == world.ManagerPending:
		return at.Add(timing.ManagerTimeout), runs
	case wasAway: // the state is the former one until its pod comes and begins
		return at.Add(timing.ManagerReturns), true
	case state == world.ManagerSuccess || state == world.ManagerFailed:
		return time.Time{}, false
	}
	return at.Add(timing.ManagerTimeout), runs
}

// answering reports whether mig-manager still has time to answer.
func answering(v *view.View) bool {
	by, waits := answersBy(v)
	return waits && by.After(v.World.Now)
}

// Answering finds that mig-manager is still at work on its label of before under another policy, and forgets that once it is over: its
// next pod may begin anew, and is the administrator's.
func Answering(v *view.View, _ state.State) gate.Finding {
	if _, _, former := formerSince(v); !former || Released(v) {
		return gate.Finding{}
	}
	if by, _ := answersBy(v); answering(v) {
		return gate.Finding{After: by.Sub(v.World.Now)}
	}
	patch, _ := Forget(v)
	return gate.Finding{Repair: []action.Action{patch}}
}

// Answered is the gate before a node is forgotten: mig-manager has answered to its label of before, or the time for that is over.
func Answered(v *view.View) (gate.Judgement, bool) {
	by, waits := answersBy(v)
	left := by.Sub(v.World.Now)
	if !waits || left <= 0 {
		return gate.Judgement{}, false
	}
	return gate.Judgement{
		State: state.Releasing, Reason: v1alpha1.ReasonMIGManagerBusy, After: left,
		Message: fmt.Sprintf("Waiting for NVIDIA's mig-manager, which has its former label again (%s), until %s at the latest; a change of the "+
			"ClusterPolicy before that would restart mig-manager", view.ManagerState(v), format.Clock(by)),
	}, true
}

// Forget removes the stamp from a node that is forgotten, and reports whether there was one.
func Forget(v *view.View) (patch action.PatchNode, is bool) {
	patch = v.Patch("forgetting what NVIDIA's mig-manager was asked for")
	patch.Annotations[v1alpha1.AnnotationMIGConfig] = nil
	_, is = v.Node.Annotations[v1alpha1.AnnotationMIGConfig]
	return patch, is
}
