// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package change

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/clients"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/conflicts"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/eviction"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/maintenance"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiadra"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/plugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Next derives the state of a node and what to do about it.
func Next(v *view.View) gate.Judgement {
	j := next(v)
	if m, is := view.UnderMaintenance(v); is {
		return maintenance.Maintained(v, m, j)
	}
	return maintenance.Continued(v, j)
}

// next judges a node by itself. The order of the questions is the order of a change.
func next(v *view.View) gate.Judgement {
	if !v.Node.AgentReady && v.Node.GPU.Spec.Reboot != nil {
		return maintenance.Down(v)
	}
	if nvidiamig.Released(v) {
		return released(v)
	}
	if problem := nvidiadra.Dynamic(v); problem != nil && len(v.Node.GPU.Spec.Devices) > 0 { // also while the agent is away: it would make them again
		return gate.Judgement{
			State: state.Unsupported, Reason: problem.Reason, Message: problem.Message,
			Next: gate.AtOnce(desired.Withdraw(v, "leaving the MIG instances to NVIDIA's DRA driver")),
		}
	}
	if j, is := NotReporting(v); is {
		return j
	}
	if v.Unsupported != nil {
		return gate.Judgement{
			State: state.Unsupported, Reason: v.Unsupported.Reason, Message: v.Unsupported.Message,
			Next: gate.AtOnce(append(gate.GiveBack(v, "the policy cannot be honoured here"), nvidiamig.KeepOff(v)...)...),
		}
	}
	j := progress(v)
	if f := view.Failed(v); f != nil && (v.FallsBack || j.State == state.PendingDisruptive) {
		return failedBefore(v, *f, j)
	}
	return j
}

// failedBefore reports why the change failed, while the node is on its way back, or waits to become idle after all.
func failedBefore(v *view.View, f v1alpha1.FailedChange, j gate.Judgement) gate.Judgement {
	j.Rollback = j.State
	switch {
	case !v.FallsBack && len(v.Blockers) == 0:
		return j // it did not become idle in time, but now it is
	case !v.FallsBack:
		j.Next = gate.AtOnce(gate.LetGo(v, "it did not become idle in time")...)
		j.Message = f.Message + "; it is tried again when the node is idle, a policy for it changes or you annotate the GPUNode (" + retry(v) + "); now " + eviction.Describe(v)
	case j.State == state.UpToDate:
		j.Message = f.Message + "; the node was rolled back to its last good state and is tried again when the policy changes or you annotate the " +
			"GPUNode: " + retry(v)
	default:
		j.Message = fmt.Sprintf("%s; the node goes back to its last good state (%s: %s)", f.Message, j.State, j.Message)
	}
	j.State, j.Reason = state.Failed, f.Reason
	return j
}

// retry is the command that has a failed node tried again.
func retry(v *view.View) string {
	return fmt.Sprintf("kubectl annotate gpunode %s --overwrite %s=$(date +%%s)", v.Node.Name, v1alpha1.AnnotationRetry)
}

// progress is the state of a node on its way to its target.
func progress(v *view.View) gate.Judgement {
	asks := v.Asks()
	if j, pending := byManager(v, asks); pending {
		return j
	}
	timeout, rests := view.Rests(v)
	switch {
	case conflicts.LeavesInstances(v):
		return applying(v)
	case asks && view.Stranded(v):
		return maintenance.AwaitReboot(v)
	case v.OnlyComputeMode():
		return afterApplying(v)
	case rests:
		return resting(v, timeout)
	case asks && gaveUp(v):
		return applying(v)
	case disrupts(v, asks):
		return disrupt(v, asks)
	case !asks:
		return setGently(v)
	}
	if v.Applied() {
		return afterApplying(v)
	}
	if j, over := nvidiamig.Verify(v); over && v.Partitions() {
		return j
	}
	return applying(v)
}

// disrupts reports whether the node has to be brought to where its GPUs can be changed. Once the agent is asked, that is only so while
// something blocks it.
func disrupts(v *view.View, asks bool) bool {
	return v.Disruptive() && (!asks || len(v.Blockers) > 0 || v.Closes() || view.Ousts(v))
}

// afterApplying is the state of a node whose GPUs are as its target has them.
func afterApplying(v *view.View) gate.Judgement {
	gates := []gate.Func{contested, selecting, plugin.Enumerating, verifying, settling}
	if v.ByDriver() {
		gates = []gate.Func{selecting, nvidiadra.Publishing}
	}
	for _, gate := range gates {
		if j, pending := gate(v); pending {
			return j
		}
	}
	return done(v)
}

// byManager is the part of NVIDIA's mig-manager, where it partitions the GPUs of the node.
func byManager(v *view.View, asks bool) (gate.Judgement, bool) {
	switch {
	case v.Partitions() && asks && v.Node.GPU.Spec.MIGConfigName != "":
		return managerReturns(v, nvidiamig.Drive(v)), true
	case v.Partitions() && !asks && v.Taint() == nil:
		return nvidiamig.Prepare(v)
	}
	return gate.Judgement{}, false
}

// managerReturns lets a pod of mig-manager come to a node on which it must change the GPUs and has none, because it was
// deleted or its DaemonSet changed. The DaemonSet does not tolerate our taint, so the taint is off as long as there is no
// pod. NVIDIA's device plugin is paused before that, as mig-manager does it, so the node advertises no GPU to users' pods
// that come meanwhile. The new pod applies what the label names.
func managerReturns(v *view.View, j gate.Judgement) gate.Judgement {
	if act, step := gate.Split(j.Next); len(act)+len(step.Start) > 0 || j.State == state.Failed {
		return j
	}
	switch gone := len(view.ManagerPods(v)) == 0; {
	case !gone && !v.Tainted() && !view.MustStayUntainted(v):
		j.Next = gate.WithSlot(v, taintNode(v)...)
	case gone && v.Tainted():
		j.Message = "waiting until NVIDIA's mig-manager, which has no pod on the node, comes back to apply " +
			v.Node.GPU.Spec.MIGConfigName
		patch, pauses := clients.Pause(v)
		plugins := view.Clients(v, world.DeployLabels()[0])
		switch {
		case pauses:
			j.Next = gate.AtOnce(patch)
		case len(plugins) > 0:
			j.Message += ", for which NVIDIA's device plugin has to end first: " + format.List(plugins)
		default:
			j.Next = gate.AtOnce(gate.Untaint(v)...)
		}
	}
	return j
}
