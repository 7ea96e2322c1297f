// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// awaitUntainted removes our taint.
func awaitUntainted(v *View) (Result, bool) {
	return Result{
		State: Finishing, Reason: v1alpha1.ReasonProgressing, Message: "done; the taint of the operator is being removed",
		Next: atOnce(removeTaints(v)...),
	}, v.Taint() != nil
}

// changeDone removes our taint and records what was reached.
func changeDone(v *View) Result {
	if r, is := awaitUntainted(v); is {
		return r // what was reached is recorded after that, together with Ready
	}
	if r, is := awaitLimited(v); is {
		return r
	}
	r := Result{State: UpToDate, Reason: v1alpha1.ReasonReady}
	if v.Target.ReleasesNode && MPSLabelOverridden(v) {
		return allowingNVIDIAMPS(v, r)
	}
	r.Next = atOnce(recordReached(v)...)
	return r
}

// removeTaints takes the taint of a change off the node and its devices, wherever it is.
func removeTaints(v *View) []action.Action {
	var actions []action.Action
	if v.Node.HasChangingTaint() {
		actions = append(actions, action.Untaint{Node: v.Node.Name})
	}
	if !v.Node.DevicesTaintedAt.IsZero() {
		actions = append(actions, action.UntaintDevices{Node: v.Node.Name})
	}
	return actions
}

// RestoreScheduling takes back what makes a node unavailable though its GPUs are not being changed: our taint, and
// operands that we stopped.
func RestoreScheduling(v *View, why string) []action.Action {
	actions := removeTaints(v)
	if patch, starts := startOperands(v, why); starts {
		actions = append(actions, patch)
	}
	return actions
}

// LooksFirst is what is done in the place of actions that let pods come to the node again, where its device plugin, which goes on through changes for
// pods that wait (mustStop), may list instances that are gone: it stops first, until the node offers none of them, or has not ended in time. It looks
// again when it starts. NVIDIA's MPS daemon would stop with it, so it goes on where that has clients.
func LooksFirst(v *View, actions []action.Action) (first []action.Action, remaining time.Duration, is bool) {
	switch frees := slices.ContainsFunc(actions, action.Frees); {
	case frees && v.Stack == dra.DRADriver:
		return driverLooksFirst(v)
	case !frees || !mayListGone(v):
		return nil, 0, false
	}
	plugin := cluster.DeployLabels()[:1]
	if _, remaining = beingAdmitted(v); remaining > 0 {
		return nil, remaining, true
	}
	if patch, stops := stopPatch(v, plugin); stops {
		if hasNVIDIAMPSClients(v) {
			return nil, 0, false
		}
		patch.Why = "stopping NVIDIA's device plugin, which may list MIG instances that are gone"
		recorded, _ := cluster.Stopped(map[string]string{v1alpha1.AnnotationStopped: *patch.Annotations[v1alpha1.AnnotationStopped]})
		patch.Annotations[v1alpha1.AnnotationStopped] = cluster.StoppedRecord(recorded, v.Snapshot.Now) // DCGM may have been stopped long before
		return []action.Action{patch}, 0, true
	}
	remaining = v.Node.MarkedAtWorkSince.Add(timing.StopTimeout).Sub(v.Snapshot.Now)
	waits := slices.Contains(StoppedByOperator(v), plugin[0]) && (len(pluginPodUIDs(v)) > 0 || !AdvertisesNoGPU(v))
	return nil, remaining, waits && remaining > 0
}

// mayListGone reports whether the device plugin of a node on demand may list instances that are gone: the agent has been asked for others, and has not
// reported those that the plugin has seen. A GPUNode that is lost tells neither.
func mayListGone(v *View) bool {
	seen, leaving, _ := enumeratedInstances(v)
	spec := v.Node.GPU.Spec
	if lost := spec.ChangeTime.IsZero() && seen != ""; !v.ByGPUOperator() || !lost && spec.OnDemand != v1alpha1.OnDemandModeApply {
		return false
	}
	applied := condition.IsTrueAt(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied, v.Node.GPU.Generation)
	return !applied || hashOfInstances(v) != seen || slices.ContainsFunc(leaving, func(uid string) bool { return slices.Contains(pluginPodUIDs(v), uid) })
}

// pluginGoesOn reports whether the device plugin serves instances of a node that is kept from its users, as through a change for pods that wait, also where the
// node is to be on demand no more.
func pluginGoesOn(v *View) bool {
	seen, _, _ := enumeratedInstances(v)
	return v.ByGPUOperator() && v.Node.HasChangingTaint() && seen != "" && v.Node.Labels[cluster.DeployLabels()[0]] == cluster.LabelTrue
}

// restoreSchedulingUnlessBusy is RestoreScheduling unless the agent is at work on an earlier desired state, which holds
// the node for good reason.
func restoreSchedulingUnlessBusy(v *View, why string) []action.Action {
	if BusyFor(v) > 0 {
		return nil
	}
	return RestoreScheduling(v, why)
}

// startOperands is the patch that starts NVIDIA's operands again, if we stopped any.
func startOperands(v *View, why string) (patch action.PatchNode, starts bool) {
	if patch, starts = startPatch(v); !starts {
		return v.Patch(why), false
	}
	patch.Why = "starting NVIDIA's operands again: " + why
	stampResumed(v, patch)
	return patch, true
}

// unavailableSince is since when the node is kept from its users: the later of our taint and our stopping of operands; zero if it
// is not.
func unavailableSince(v *View) (since time.Time) {
	if t := v.Taint(); t != nil && t.TimeAdded != nil {
		since = t.TimeAdded.Time
	}
	if len(StoppedByOperator(v)) > 0 {
		since = timing.Latest(since, v.Node.MarkedAtWorkSince)
	}
	return since
}
