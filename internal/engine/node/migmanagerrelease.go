// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// A node that returns to its baseline gets the label back that mig-manager had before, and mig-manager itself where it was kept off. mig-manager
// applies what the label names, which may be another layout than the one in which the node was found, and from then on the GPUs are the
// administrator's: to restore them once more would begin a fight without end. The ClusterPolicy keeps naming the operator's ConfigMap until
// mig-manager has answered: to change that replaces the pod of mig-manager, which in the middle of its work would leave NVIDIA's clients paused.

// managerReleaseLabels are the labels of mig-manager's that a node goes back to when nothing of ours is to be applied there. Its state is removed
// with that, so that the next one is its answer.
func managerReleaseLabels(v *View, labels map[string]*string) {
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

// stampManagerRequest notes in the patch of a release since when mig-manager has its label back, and removes the stamp of anything else that it was
// asked for. One from a clock that was ahead is written anew: its time would end late.
func stampManagerRequest(v *View, patch action.PatchNode) {
	name := labelRestored(v, patch)
	if at, former, is := managerFormerSince(v); name == "" && is && v.Target.Final {
		if !at.After(v.Snapshot.Now) {
			return
		}
		name = former
	}
	if name != "" {
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = new(timing.Stamp(name, v.Snapshot.Now))
		return
	}
	if _, asked := v.Node.Annotations[v1alpha1.AnnotationMIGConfig]; asked && !managerMayAnswer(v) {
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = nil
	}
}

// labelRestored is the former label that a patch gives back to mig-manager; empty if it gives none back, or if no mig-manager is to read it.
func labelRestored(v *View, patch action.PatchNode) string {
	_, manager := patch.Labels[v1alpha1.LabelMIGManager]
	_, config := patch.Labels[v1alpha1.LabelMIGConfig]
	name := labelPatched(v, patch, v1alpha1.LabelMIGConfig)
	reads := v.Managed() || labelPatched(v, patch, v1alpha1.LabelMIGManager) == cluster.LabelTrue
	if !v.Target.Final || !reads || !manager && !config || migmanager.Ours(name) || name == migConfigClaimed {
		return ""
	}
	return name
}

// labelPatched is the value of a label once a patch is written.
func labelPatched(v *View, patch action.PatchNode, label string) string {
	if value, changes := patch.Labels[label]; changes {
		return ptr.Deref(value, "")
	}
	return v.Node.Labels[label]
}

// managerReleased reports whether mig-manager has the label back that it had before, so that the GPUs are not the operator's any more.
func managerReleased(v *View) bool {
	_, _, is := managerFormerSince(v)
	return is && v.Target.Final
}

// managerFormerSince is since when mig-manager has the label back that it had before, and its value; another policy may govern the node since.
func managerFormerSince(v *View) (at time.Time, name string, is bool) {
	name, at, is = timing.Parse(v.Node.Annotations[v1alpha1.AnnotationMIGConfig])
	return at, name, is && name != "" && !migmanager.Ours(name)
}

// managerAnswersBy is until when the answer of mig-manager to its former label is waited for; ok is false if it has answered, has no pod on the
// node that could, or if no change of the ClusterPolicy would replace its pod.
func managerAnswersBy(v *View) (by time.Time, ok bool) {
	at, _, former := managerFormerSince(v)
	if !former || v.Node.GPU.Spec.Baseline == nil || !v.Snapshot.Plugin.MIGReady {
		return time.Time{}, false
	}
	runs, wasAway := len(managerPods(v)) > 0, v.Node.GPU.Spec.MIGActuator == ""
	switch state := v.Node.Labels[v1alpha1.LabelMIGConfigState]; {
	case state == cluster.ManagerRebooting:
		return at.Add(timing.RebootTimeout), runs
	case state == cluster.ManagerPending:
		return at.Add(timing.ManagerTimeout), runs
	case wasAway: // the state is the former one until its pod comes and begins
		return at.Add(timing.ManagerReturns), true
	case state == cluster.ManagerSuccess || state == cluster.ManagerFailed:
		return time.Time{}, false
	}
	return at.Add(timing.ManagerTimeout), runs
}

// managerMayAnswer reports whether mig-manager still has time to answer.
func managerMayAnswer(v *View) bool {
	by, waits := managerAnswersBy(v)
	return waits && by.After(v.Snapshot.Now)
}

// migManagerAnswering finds that mig-manager is still at work on its label of before under another policy, and forgets that once it is over: its
// next pod may begin anew, and is the administrator's.
func migManagerAnswering(v *View, _ State) finding {
	if _, _, former := managerFormerSince(v); !former || managerReleased(v) {
		return finding{}
	}
	if by, _ := managerAnswersBy(v); managerMayAnswer(v) {
		return finding{After: by.Sub(v.Snapshot.Now)}
	}
	patch, _ := ForgetManager(v)
	return finding{Repair: []action.Action{patch}}
}

// migManagerDone is the gate before a node is forgotten: mig-manager has answered to its label of before, or the time for that is over.
func migManagerDone(v *View) (Result, bool) {
	by, waits := managerAnswersBy(v)
	left := by.Sub(v.Snapshot.Now)
	if !waits || left <= 0 {
		return Result{}, false
	}
	return Result{
		State: Releasing, Reason: v1alpha1.ReasonMIGManagerBusy, After: left,
		Message: fmt.Sprintf("Waiting for NVIDIA's mig-manager, which has its former label again (%s), until %s at the latest; a change of the "+
			"ClusterPolicy before that would restart mig-manager", managerState(v), format.Clock(by)),
	}, true
}

// ForgetManager removes the stamp from a node that is forgotten, and reports whether there was one.
func ForgetManager(v *View) (patch action.PatchNode, is bool) {
	patch = v.Patch("forgetting what NVIDIA's mig-manager was asked for")
	patch.Annotations[v1alpha1.AnnotationMIGConfig] = nil
	_, is = v.Node.Annotations[v1alpha1.AnnotationMIGConfig]
	return patch, is
}
